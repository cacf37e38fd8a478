// Products of matrices of centered integers of at most 16 bits, both of them values: rows by panels of columns.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "finish.h"

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
// exactly, of which those of b are signed and those of a are of the type that it reads. Both may have zero points then,
// which are taken out of the sums: (a - y)(b - z) = a b - y (b - z) - z a.
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

  // Centered, or as a signed byte.
  template <typename T>
  Value read(T value) const {
    if (sizeof(Value) == 1) return (Value)(m.b_type == U8 ? value ^ 0x80 : value);
    return (Value)((int32_t)value - m.b_zero);
  }

  // `at` is where the matrix begins among the values of b.
  void fill(const char* b, int64_t at) {
    if (m.b_type == U8) fill((const uint8_t*)b + at);
    else if (m.b_type == I8) fill((const int8_t*)b + at);
    else fill((const int16_t*)b + at);
  }

  template <typename T>
  void fill(const T* from) {
    if (m.b_column == 1) {
      for (int64_t k = 0; k < m.depth; k += N)
        for (int64_t n = 0; n < m.columns; n += WIDE) {
          const T* rows = from + k * m.b_row + n;
          if (k + N <= m.depth && n + WIDE <= m.columns) put_rows(rows, at(n, k), N, WIDE);
          else put_rows(rows, at(n, k), std::min<int64_t>(N, m.depth - k), std::min<int64_t>(WIDE, m.columns - n));
        }
      return;
    }
    for (int64_t n = 0; n < m.columns; ++n) {
      __builtin_prefetch(from + (n + 8) * m.b_column);
      put_column(from + n * m.b_column, at(n, 0));
    }
  }

  // Neighbours of some rows.
  template <typename T>
  ALWAYS void put_rows(const T* from, Value* to, int64_t rows, int64_t n) {
    using Bits = std::make_unsigned_t<Value>;
    uint32_t together[WIDE] = {};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < n; ++i)
        together[i] |= (uint32_t)(Bits)read(from[r * m.b_row + i]) << (8 * sizeof(Value) * r);
    std::memcpy(to, together, n * sizeof(uint32_t));
  }

  template <typename T>
  void put_column(const T* from, Value* to) {
    int64_t k = 0;
    for (; k + N <= m.depth; k += N, to += N * WIDE) {
      if constexpr (sizeof(Value) == 1) {
        uint32_t together;
        std::memcpy(&together, from + k, 4);
        together ^= m.b_type == U8 ? 0x80808080u : 0;
        std::memcpy(to, &together, 4);
      } else {
        for (int i = 0; i < N; ++i) to[i] = read(from[k + i]);
      }
    }
    for (int i = 0; k < m.depth; ++k, ++i) to[i] = read(from[k]);
  }
};

// `R` rows of `a`, each of `groups`, by a panel. Sums start from what there is for each row and each column.
template <int R, typename Value>
void multiply(const Value* a, const Value* panel, int64_t groups, const int32_t* of_rows, const int32_t* of_columns,
              int32_t* sums) {
  constexpr int V = WIDE / LANES, N = TOGETHER<Value>;
  Ints c[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) c[r][v] = add(load_ints(of_columns + LANES * v), all_ints(of_rows[r]));
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
void multiply_rows(const Value* a, int n, const Value* panel, int64_t groups, const int32_t* of_rows,
                   const int32_t* of_columns, int32_t* sums) {
  for (; n >= R; n -= R, a += R * groups * TOGETHER<Value>, of_rows += R, sums += R * WIDE)
    multiply<R>(a, panel, groups, of_rows, of_columns, sums);
  if constexpr (R > 1) multiply_rows<R / 2>(a, n, panel, groups, of_rows, of_columns, sums);
}

// A row of a: words less the zero point, or bytes as they are read. Returns what its sums start from.
inline int32_t copy_row(const Matrices& m, const char* a, int64_t from, int16_t* to) {
  if (m.a_type == U8) widen((const uint8_t*)a + from, m.depth, m.a_zero, to);
  else if (m.a_type == I8) widen((const int8_t*)a + from, m.depth, m.a_zero, to);
  else
    for (int64_t k = 0; k < m.depth; ++k) to[k] = (int16_t)((int32_t)((const int16_t*)a + from)[k] - m.a_zero);
  return 0;
}
inline int32_t copy_row(const Matrices& m, const char* a, int64_t from, int8_t* __restrict to) {
  const uint8_t turned = m.a_type == READ ? 0 : 0x80;
  const uint8_t* __restrict bytes = (const uint8_t*)a + from;
  for (int64_t k = 0; k < m.depth; ++k) to[k] = (int8_t)(bytes[k] ^ turned);
  const int32_t z = m.b_zero - (m.b_type == U8 ? 128 : 0);
  if (!z) return 0;
  const Ints ones = all_ints(0x01010101);
  Ints sum = all_ints(0);
  int64_t k = 0;
  for (; k + 4 * LANES <= m.depth; k += 4 * LANES) sum = dot_bytes(sum, load_packed(to + k), ones);
  int32_t sums[LANES];
  store_16(sums, sum, All{});
  uint32_t all = 0;
  for (int i = 0; i < LANES; ++i) all += (uint32_t)sums[i];
  for (; k < m.depth; ++k) all += READ == U8 ? (uint8_t)to[k] : (uint32_t)(int32_t)to[k];
  return (int32_t)(-(uint32_t)z * all);
}

// What the sums of a panel's columns start from besides the offset.
inline void begin(const Matrices&, const int16_t*, int64_t, int32_t*) {}
inline void begin(const Matrices& m, const int8_t* panel, int64_t groups, int32_t* start) {
  const int32_t y = m.a_type == READ ? m.a_zero : m.a_zero + (READ == U8 ? 128 : -128);
  if (!y) return;
  const uint32_t z = m.depth * (m.b_zero - (m.b_type == U8 ? 128 : 0));
  constexpr int8_t ones[4] = {1, 1, 1, 1};
  for (int v = 0; v < WIDE; v += LANES) {
    Ints sum = all_ints(0);
    for (int64_t k = 0; k < groups; ++k) sum = dot(sum, ones, load_packed(panel + 4 * (WIDE * k + v)));
    int32_t sums[LANES];
    store_16(sums, sum, All{});
    for (int i = 0; i < LANES; ++i) start[v + i] = (int32_t)((uint32_t)start[v + i] - (uint32_t)y * ((uint32_t)sums[i] - z));
  }
}

// Rows by all panels of b.
template <typename Value>
struct Rows {
  const Matrices& m;
  const Panels<Value>& b;
  const int64_t each;  // values of a row
  std::vector<Value> rows;
  std::vector<int32_t> starts;
  int32_t sums[TALL * WIDE], of_rows[TALL];

  explicit Rows(const Panels<Value>& b)
      : m(b.m), b(b), each(b.groups * TOGETHER<Value>), rows(TALL * each), starts(b.panels * WIDE) {
    if (m.offset) std::copy(m.offset, m.offset + m.columns, starts.begin());
    for (int64_t p = 0; p < b.panels; ++p) begin(m, b.panel(p), b.groups, &starts[p * WIDE]);
  }

  // `n` rows of a, at most TALL, of which the first begins at `from`. The tail takes row i as row `row + i` of what is
  // stored, whose columns begin at `column`.
  void operator()(const char* a, int64_t from, int n, const Tail& t, int64_t period, int64_t row, int64_t column) {
    for (int r = 0; r < n; ++r) of_rows[r] = copy_row(m, a, from + r * m.a_row, &rows[r * each]);
    for (int64_t p = 0; p < b.panels; ++p) {
      multiply_rows<TALL>(rows.data(), n, b.panel(p), b.groups, of_rows, &starts[p * WIDE], sums);
      const int width = (int)std::min<int64_t>(WIDE, m.columns - p * WIDE);
      finish_rows(t, sums, n, WIDE, width, (int)(p * WIDE % period), row, column + p * WIDE);
    }
  }
};

// How many rows one of `threads` threads takes of every product at a time.
inline int64_t rows_at_once(const Matrices& m, int threads) {
  const int64_t products = m.outer * m.inner, parts = products < threads ? threads : 1;
  return std::max<int64_t>(1, ((m.rows + parts - 1) / parts + TALL - 1) / TALL * TALL);
}

// Rows [first, last) of one of the products, which is `outer` and `inner` along the batch axes.
struct RowsOfProduct {
  int64_t product, outer, inner, first, last;
};

// Calls `work` for all rows of all products. Every thread takes products, or a part of the rows of one where there are
// fewer products than threads.
template <typename Work>
void for_rows_of_products(const Matrices& m, int threads, const Work& work) {
  const int64_t each = rows_at_once(m, threads), parts = (m.rows + each - 1) / each;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t job = 0; job < m.outer * m.inner * parts; ++job) {
    const int64_t product = job / parts, first = job % parts * each;
    work(RowsOfProduct{product, product / m.inner, product % m.inner, first, std::min(m.rows, first + each)});
  }
}

// Whether four bytes are multiplied at once.
inline bool multiplies_bytes(const Matrices& m) { return DOTS_BYTES == EXACTLY && m.a_type <= I8 && m.b_type <= I8; }
