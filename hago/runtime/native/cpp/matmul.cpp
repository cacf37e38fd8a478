// Products of matrices, both of them values: sums modulo 2**32, and a tail.
#include "matrices.h"

namespace {

template <typename Value>
void multiply_matrices(const Matrices& m, const Tail& t, int64_t period, const char* a, const char* b, int threads) {
  const int64_t each = rows_at_once(m, threads), parts = (m.rows + each - 1) / each;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t job = 0; job < m.outer * m.inner * parts; ++job) {
    const int64_t product = job / parts, first = job % parts * each, last = std::min(m.rows, first + each);
    const int64_t outer = product / m.inner, inner = product % m.inner;
    Panels<Value> panels(m);
    panels.fill(b, outer * m.b_outer + inner * m.b_inner);
    Rows<Value> rows(panels);
    for (int64_t row = first; row < last; row += TALL)
      rows(a, outer * m.a_outer + inner * m.a_inner + row * m.a_row, (int)std::min<int64_t>(TALL, last - row), t, period,
           product * m.rows + row, 0);
  }
}

}  // namespace

// Every thread takes products, or a part of the rows of one where there are fewer products than threads. Arrays of the
// tail are `period` long.
extern "C" void hago_matmul(const Matrices* matrices, const Tail* tail, const char* a, const char* b, int64_t period,
                            int threads) {
  const Matrices& m = *matrices;
  if (multiplies_bytes(m)) multiply_matrices<int8_t>(m, *tail, period, a, b, threads);
  else multiply_matrices<int16_t>(m, *tail, period, a, b, threads);
}
