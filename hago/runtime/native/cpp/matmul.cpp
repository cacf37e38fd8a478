// Products of matrices of centered integers of at most 16 bits, both of them values: sums modulo 2**32, and a tail.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "finish.h"

namespace {

#ifdef HAGO_AVX512
constexpr int WIDE = 32;  // columns of a panel
constexpr int TALL = 12;  // rows that are worked on at once
#else
constexpr int WIDE = WIDEST, TALL = TALLEST;
#endif

// Steps are in elements. One of the two of a matrix of b is 1, and `a` has its columns side by side.
struct Matrices {
  int64_t outer, inner;  // how many products: two axes of batches
  int64_t rows, columns, depth;
  int64_t a_outer, a_inner, a_row;
  int64_t b_outer, b_inner, b_row, b_column;
  int32_t a_type, a_zero, b_type, b_zero;
  const int32_t* offset;  // per column, what sums start from; null for nothing
};

// b as [panel of columns][pair of rows][column][2], zero where there is nothing.
struct Panels {
  const Matrices& m;
  const int64_t pairs, panels;
  std::vector<int16_t> room;

  explicit Panels(const Matrices& m)
      : m(m), pairs((m.depth + 1) / 2), panels((m.columns + WIDE - 1) / WIDE), room(pairs * panels * WIDE * 2) {}

  int16_t* at(int64_t column, int64_t row) {
    return &room[((column / WIDE * pairs + row / 2) * WIDE + column % WIDE) * 2 + row % 2];
  }
  const int16_t* panel(int64_t p) const { return &room[p * pairs * WIDE * 2]; }

  template <typename T>
  void fill(const T* from) {
    if (m.b_column == 1) {
      for (int64_t k = 0; k < m.depth; ++k)
        for (int64_t n = 0; n < m.columns; n += WIDE)
          put(from + k * m.b_row + n, at(n, k), std::min<int64_t>(WIDE, m.columns - n));
      return;
    }
    for (int64_t n = 0; n < m.columns; ++n) put_pairs(from + n * m.b_column, at(n, 0));
  }

  // Neighbours of a row.
  template <typename T>
  void put(const T* from, int16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[2 * i] = (int16_t)((int32_t)from[i] - m.b_zero);
  }

  // Neighbours of a column, two by two.
  template <typename T>
  void put_pairs(const T* from, int16_t* to) {
    int64_t k = 0;
    for (; k + 2 <= m.depth; k += 2, to += 2 * WIDE) {
      const int16_t pair[2] = {(int16_t)((int32_t)from[k] - m.b_zero), (int16_t)((int32_t)from[k + 1] - m.b_zero)};
      std::memcpy(to, pair, sizeof(pair));
    }
    if (k < m.depth) to[0] = (int16_t)((int32_t)from[k] - m.b_zero);
  }
};

// `R` rows of `a`, each of `pairs` pairs, by a panel.
template <int R>
void multiply(const int16_t* a, const int16_t* panel, int64_t pairs, const int32_t* start, int32_t* sums) {
  constexpr int V = WIDE / LANES;
  Ints c[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) c[r][v] = load_ints(start + LANES * v);
  for (int64_t k = 0; k < pairs; ++k) {
    Ints b[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) b[v] = load_packed(panel + 2 * (WIDE * k + LANES * v));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Ints both = all_packed(a + (r * pairs + k) * 2);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) c[r][v] = dot_words(c[r][v], b[v], both);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store_16(sums + r * WIDE + LANES * v, c[r][v], All{});
}

// Rows [begin, end) of one product, of which the first is row `row` of what is stored.
void some_rows(const Matrices& m, const Tail& t, int64_t period, const char* a, int64_t from, const Panels& b,
               int64_t begin, int64_t end, int64_t row) {
  std::vector<int16_t> rows(TALL * b.pairs * 2);
  int32_t sums[TALL * WIDE], start[WIDE], wide[ROW];
  for (int64_t first = begin; first < end; first += TALL) {
    const int n = (int)std::min<int64_t>(TALL, end - first);
    for (int r = 0; r < n; ++r)
      for (int64_t k = 0; k < m.depth; k += ROW) {
        const int some = (int)std::min<int64_t>(ROW, m.depth - k);
        load(a, m.a_type, m.a_zero, from + (first + r) * m.a_row + k, wide, some);
        for (int i = 0; i < some; ++i) rows[r * b.pairs * 2 + k + i] = (int16_t)wide[i];
      }
    for (int64_t p = 0; p < b.panels; ++p) {
      const int width = (int)std::min<int64_t>(WIDE, m.columns - p * WIDE);
      for (int i = 0; i < WIDE; ++i) start[i] = m.offset && i < width ? m.offset[p * WIDE + i] : 0;
      if (n == TALL) multiply<TALL>(rows.data(), b.panel(p), b.pairs, start, sums);
      else
        for (int r = 0; r < n; ++r) multiply<1>(&rows[r * b.pairs * 2], b.panel(p), b.pairs, start, sums + r * WIDE);
      finish_rows(t, sums, n, WIDE, width, (int)(p * WIDE % period), row + first, p * WIDE);
    }
  }
}

}  // namespace

// Every thread takes products, or a part of the rows of one where there are fewer products than threads. Arrays of the
// tail are `period` long.
extern "C" void hago_matmul(const Matrices* matrices, const Tail* tail, const char* a, const char* b, int64_t period,
                            int threads) {
  const Matrices& m = *matrices;
  const int64_t products = m.outer * m.inner, parts = products < threads ? threads : 1;
  const int64_t each = ((m.rows + parts - 1) / parts + TALL - 1) / TALL * TALL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t job = 0; job < products * parts; ++job) {
    const int64_t product = job / parts, begin = job % parts * each, end = std::min(m.rows, begin + each);
    if (begin >= end) continue;
    const int64_t outer = product / m.inner, inner = product % m.inner, at = outer * m.b_outer + inner * m.b_inner;
    Panels panels(m);
    if (m.b_type == U8) panels.fill((const uint8_t*)b + at);
    else if (m.b_type == I8) panels.fill((const int8_t*)b + at);
    else panels.fill((const int16_t*)b + at);
    some_rows(m, *tail, period, a, outer * m.a_outer + inner * m.a_inner, panels, begin, end, product * m.rows);
  }
}
