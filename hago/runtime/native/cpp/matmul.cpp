// Products of matrices, both of them values: sums modulo 2**32, and a tail.
#include "matrices.h"

namespace {

template <typename Value>
void multiply_matrices(const Matrices& m, const Tail& t, int64_t period, const char* a, const char* b, int threads) {
  for_rows_of_products(m, threads, [&](const RowsOfProduct& of) {
    const auto [product, outer, inner, first, last] = of;
    Panels<Value> panels(m);
    panels.fill(b, outer * m.b_outer + inner * m.b_inner);
    Rows<Value> rows(panels);
    for (int64_t row = first; row < last; row += TALL)
      rows(a, outer * m.a_outer + inner * m.a_inner + row * m.a_row, (int)std::min<int64_t>(TALL, last - row), t, period,
           product * m.rows + row, 0);
  });
}

}  // namespace

// Arrays of the tail are `period` long.
extern "C" void hago_matmul(const Matrices* matrices, const Tail* tail, const char* a, const char* b, int64_t period,
                            int threads) {
  const Matrices& m = *matrices;
  if (multiplies_bytes(m)) multiply_matrices<int8_t>(m, *tail, period, a, b, threads);
  else multiply_matrices<int16_t>(m, *tail, period, a, b, threads);
}
