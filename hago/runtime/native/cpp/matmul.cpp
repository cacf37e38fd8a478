// Products of matrices of centered integers of at most 16 bits, both of them values: sums modulo 2**32, and a tail.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
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

// Values of four bytes are multiplied at once: two words, centered; or four bytes where the machine multiplies these
// exactly, of which those of b have zero point 0 and those of a are of the type that it reads.
constexpr Type READ = TURNS_UNSIGNED ? I8 : U8;
template <typename Value>
constexpr int TOGETHER = 4 / sizeof(Value);

ALWAYS Ints dot(Ints sum, const int16_t* a, Ints b) { return dot_words(sum, b, all_packed(a)); }
ALWAYS Ints dot(Ints sum, const int8_t* a, Ints b) { return dot_bytes(sum, all_packed(a), b); }

// b as [panel of columns][group of rows][column][TOGETHER], zero where there is nothing.
template <typename Value>
struct Panels {
  static constexpr int N = TOGETHER<Value>;
  const Matrices& m;
  const int64_t groups, panels;
  std::vector<Value> room;

  explicit Panels(const Matrices& m)
      : m(m), groups((m.depth + N - 1) / N), panels((m.columns + WIDE - 1) / WIDE), room(groups * panels * WIDE * N) {}

  Value* at(int64_t column, int64_t row) {
    return &room[((column / WIDE * groups + row / N) * WIDE + column % WIDE) * N + row % N];
  }
  const Value* panel(int64_t p) const { return &room[p * groups * WIDE * N]; }

  template <typename T>
  Value centered(T value) const {
    return (Value)((int32_t)value - m.b_zero);
  }

  template <typename T>
  void fill(const T* from) {
    if (m.b_column == 1) {
      for (int64_t k = 0; k < m.depth; k += N)
        for (int64_t n = 0; n < m.columns; n += WIDE)
          put_rows(from + k * m.b_row + n, at(n, k), std::min<int64_t>(N, m.depth - k),
                   std::min<int64_t>(WIDE, m.columns - n));
      return;
    }
    for (int64_t n = 0; n < m.columns; ++n) put_column(from + n * m.b_column, at(n, 0));
  }

  // Neighbours of some rows.
  template <typename T>
  void put_rows(const T* from, Value* to, int64_t rows, int64_t n) {
    using Bits = std::make_unsigned_t<Value>;
    uint32_t together[WIDE] = {};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < n; ++i)
        together[i] |= (uint32_t)(Bits)centered(from[r * m.b_row + i]) << (8 * sizeof(Value) * r);
    std::memcpy(to, together, n * sizeof(uint32_t));
  }

  template <typename T>
  void put_column(const T* from, Value* to) {
    int64_t k = 0;
    for (; k + N <= m.depth; k += N, to += N * WIDE) {
      Value together[N];
      for (int i = 0; i < N; ++i) together[i] = centered(from[k + i]);
      std::memcpy(to, together, sizeof(together));
    }
    for (int i = 0; k < m.depth; ++k, ++i) to[i] = centered(from[k]);
  }
};

// `R` rows of `a`, each of `groups`, by a panel.
template <int R, typename Value>
void multiply(const Value* a, const Value* panel, int64_t groups, const int32_t* start, int32_t* sums) {
  constexpr int V = WIDE / LANES, N = TOGETHER<Value>;
  Ints c[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) c[r][v] = load_ints(start + LANES * v);
  for (int64_t k = 0; k < groups; ++k) {
    Ints b[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) b[v] = load_packed(panel + N * (WIDE * k + LANES * v));
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) c[r][v] = dot(c[r][v], a + (r * groups + k) * N, b[v]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store_16(sums + r * WIDE + LANES * v, c[r][v], All{});
}

// `n` rows, at most TALL, in steps that keep registers busy.
template <int R, typename Value>
void multiply_rows(const Value* a, int n, const Value* panel, int64_t groups, const int32_t* start, int32_t* sums) {
  for (; n >= R; n -= R, a += R * groups * TOGETHER<Value>, sums += R * WIDE)
    multiply<R>(a, panel, groups, start, sums);
  if constexpr (R > 1) multiply_rows<R / 2>(a, n, panel, groups, start, sums);
}

// A row of a: words less the zero point, or bytes as they are read.
void copy_row(const Matrices& m, const char* a, int64_t from, int16_t* to) {
  if (m.a_type == U8) return widen((const uint8_t*)a + from, m.depth, m.a_zero, to);
  if (m.a_type == I8) return widen((const int8_t*)a + from, m.depth, m.a_zero, to);
  const int16_t* words = (const int16_t*)a + from;
  for (int64_t k = 0; k < m.depth; ++k) to[k] = (int16_t)((int32_t)words[k] - m.a_zero);
}
void copy_row(const Matrices& m, const char* a, int64_t from, int8_t* to) {
  const uint8_t turned = m.a_type == READ ? 0 : 0x80;
  const uint8_t* bytes = (const uint8_t*)a + from;
  for (int64_t k = 0; k < m.depth; ++k) to[k] = (int8_t)(bytes[k] ^ turned);
}

// What the sums of a panel start from: of bytes, less the zero point of a times those of b.
void begin(const Matrices&, const int16_t*, int64_t, int32_t*) {}
void begin(const Matrices& m, const int8_t* panel, int64_t groups, int32_t* start) {
  const int32_t zero = m.a_type == READ ? m.a_zero : m.a_zero + (READ == U8 ? 128 : -128);
  if (!zero) return;
  constexpr int8_t ones[4] = {1, 1, 1, 1};
  for (int v = 0; v < WIDE; v += LANES) {
    Ints sum = all_ints(0);
    for (int64_t k = 0; k < groups; ++k) sum = dot(sum, ones, load_packed(panel + 4 * (WIDE * k + v)));
    int32_t sums[LANES];
    store_16(sums, sum, All{});
    for (int i = 0; i < LANES; ++i) start[v + i] = (int32_t)((uint32_t)start[v + i] - (uint32_t)zero * (uint32_t)sums[i]);
  }
}

// Rows [first, last) of one product, of which the first is row `row` of what is stored.
template <typename Value>
void some_rows(const Matrices& m, const Tail& t, int64_t period, const char* a, int64_t from, const Panels<Value>& b,
               int64_t first, int64_t last, int64_t row) {
  const int64_t each = b.groups * TOGETHER<Value>;
  std::vector<Value> rows(TALL * each);
  std::vector<int32_t> starts(b.panels * WIDE);
  if (m.offset) std::copy(m.offset, m.offset + m.columns, starts.begin());
  for (int64_t p = 0; p < b.panels; ++p) begin(m, b.panel(p), b.groups, &starts[p * WIDE]);
  int32_t sums[TALL * WIDE];
  for (; first < last; first += TALL) {
    const int n = (int)std::min<int64_t>(TALL, last - first);
    for (int r = 0; r < n; ++r) copy_row(m, a, from + (first + r) * m.a_row, &rows[r * each]);
    for (int64_t p = 0; p < b.panels; ++p) {
      multiply_rows<TALL>(rows.data(), n, b.panel(p), b.groups, &starts[p * WIDE], sums);
      const int width = (int)std::min<int64_t>(WIDE, m.columns - p * WIDE);
      finish_rows(t, sums, n, WIDE, width, (int)(p * WIDE % period), row + first, p * WIDE);
    }
  }
}

template <typename Value>
void multiply_matrices(const Matrices& m, const Tail& t, int64_t period, const char* a, const char* b, int threads) {
  const int64_t products = m.outer * m.inner, parts = products < threads ? threads : 1;
  const int64_t each = ((m.rows + parts - 1) / parts + TALL - 1) / TALL * TALL;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t job = 0; job < products * parts; ++job) {
    const int64_t product = job / parts, first = job % parts * each, last = std::min(m.rows, first + each);
    if (first >= last) continue;
    const int64_t outer = product / m.inner, inner = product % m.inner, at = outer * m.b_outer + inner * m.b_inner;
    Panels<Value> panels(m);
    if (m.b_type == U8) panels.fill((const uint8_t*)b + at);
    else if (m.b_type == I8) panels.fill((const int8_t*)b + at);
    else panels.fill((const int16_t*)b + at);
    some_rows(m, t, period, a, outer * m.a_outer + inner * m.a_inner, panels, first, last, product * m.rows);
  }
}

}  // namespace

// Every thread takes products, or a part of the rows of one where there are fewer products than threads. Arrays of the
// tail are `period` long.
extern "C" void hago_matmul(const Matrices* matrices, const Tail* tail, const char* a, const char* b, int64_t period,
                            int threads) {
  const Matrices& m = *matrices;
  // centered to int8, b may be stored as either byte
  const bool bytes = DOTS_BYTES == EXACTLY && m.a_type <= I8 && m.b_zero == (m.b_type == U8 ? 128 : 0) && m.b_type <= I8;
  if (bytes) multiply_matrices<int8_t>(m, *tail, period, a, b, threads);
  else multiply_matrices<int16_t>(m, *tail, period, a, b, threads);
}
