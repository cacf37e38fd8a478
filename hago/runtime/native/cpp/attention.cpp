// Attention: the product of queries with keys, a softmax in float, and the product of its bytes with values, a few rows
// at a time, so that nothing between both products leaves the cache.
#include "matrices.h"
#include "quantize.h"
#include "softmax.h"

#if defined(HAGO_AVX512) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

namespace {

struct Attention {
  Matrices scores, product;  // `a` of the product is the softmax as it is stored, in rows of padded(scores.columns)
  float scale;               // of the scores, before the mask is added
  int32_t causal;            // whether row i sees columns up to i alone
  int32_t registers;         // 16 or 8, see softmax.h
  Grid grid;                 // of the softmax
  const float* mask;         // null for none; columns lie side by side
  int64_t mask_outer, mask_inner, mask_row;
  int64_t to_outer, to_inner;  // of what is stored, in elements
};

// A tail whose rows are stored `elements` later.
Tail later(const Tail& t, int64_t elements) {
  Tail moved = t;
  for (int k = 0; k < t.outputs; ++k) moved.output[k].data += elements * BYTES[t.output[k].type];
  if (t.adds) moved.addend.data += elements * BYTES[t.addend.type];
  return moved;
}

// The scores of a row to bytes.
void row_of(const Attention& at, float* x, const float* mask, int64_t row, char* out) {
  const int64_t n = at.scores.columns, whole = n / LANES * LANES;
  const Floats scale = all_floats(at.scale);
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats scaled = multiply(load_floats(x + i), scale);
    store_16(x + i, mask ? add(scaled, load_floats(mask + i)) : scaled, All{});
  }
  for (int64_t i = whole; i < n; ++i) x[i] = mask ? x[i] * at.scale + mask[i] : x[i] * at.scale;
  if (at.causal)
    for (int64_t i = row + 1; i < n; ++i) x[i] = mask ? -INFINITY + mask[i] : -INFINITY;
  const float by = exponentials(x, n, at.registers);
  const Grid& g = at.grid;
  if (g.rounding != HALF_EVEN) {
    for (int64_t i = 0; i < padded(n); ++i) x[i] *= by;
    return quantize_row(x, out, padded(n), g);
  }
  const Floats factor = all_floats(by), step = all_floats(g.scale), low = all_floats(g.low), high = all_floats(g.high);
  const Ints zero = all_ints(g.zero);
  for (int64_t i = 0; i < padded(n); i += LANES) {
    const Floats v = divide(multiply(load_floats(x + i), factor), step);
    // what is not a number becomes `low`
    store_16((uint8_t*)out + i, add(to_ints(smaller(larger(v, low), high)), zero), All{});
  }
}

template <typename Scores, typename Product>
void attend(const Attention& at, const Tail& scores_tail, const Tail& tail, const char* q, const char* k, const char* v,
            int64_t period, int threads) {
  const Matrices &s = at.scores, &p = at.product;
  for_rows_of_products(s, threads, [&](const RowsOfProduct& of) {
    const auto [product, outer, inner, first, last] = of;
    Panels<Scores> keys(s);
    keys.fill(k, outer * s.b_outer + inner * s.b_inner);
    Panels<Product> values(p);
    values.fill(v, outer * p.b_outer + inner * p.b_inner);
    Rows<Scores> by_keys(keys);
    Rows<Product> by_values(values);
    const int64_t pitch = padded(s.columns);
    std::vector<float> real(TALL * pitch);
    std::vector<char> bytes(TALL * pitch);
    const Tail there = later(tail, outer * at.to_outer + inner * at.to_inner);
    Tail here = scores_tail;
    here.output[0].data = reinterpret_cast<char*>(real.data());
    here.output[0].stride = pitch;
    for (int64_t row = first; row < last; row += TALL) {
      const int n = (int)std::min<int64_t>(TALL, last - row);
      by_keys(q, outer * s.a_outer + inner * s.a_inner + row * s.a_row, n, here, 1, 0, 0);
      for (int r = 0; r < n; ++r) {
        const float* mask = at.mask ? at.mask + outer * at.mask_outer + inner * at.mask_inner + (row + r) * at.mask_row
                                    : nullptr;
        row_of(at, &real[r * pitch], mask, row + r, &bytes[r * pitch]);
      }
      by_values(bytes.data(), 0, n, there, period, row, 0);
    }
  });
}

}  // namespace

// The tail of the scores writes real values; arrays of both tails are per tensor or, of the last, `period` long.
extern "C" void hago_attention(const Attention* attention, const Tail* scores_tail, const Tail* tail, const char* q,
                               const char* k, const char* v, int64_t period, int threads) {
  const bool bytes[] = {multiplies_bytes(attention->scores), multiplies_bytes(attention->product)};
  auto run = bytes[0] ? bytes[1] ? attend<int8_t, int8_t> : attend<int8_t, int16_t>
                      : bytes[1] ? attend<int16_t, int8_t> : attend<int16_t, int16_t>;
  run(*attention, *scores_tail, *tail, q, k, v, period, threads);
}

// The softmax of rows, in place; whether there is one here.
extern "C" int hago_softmax(int64_t rows, int64_t columns, int registers, float* x) {
#ifdef HAGO_FMA
  std::vector<float> padded_row(padded(columns));
  for (int64_t row = 0; row < rows; ++row, x += columns) {
    std::copy(x, x + columns, padded_row.begin());
    const float by = exponentials(padded_row.data(), columns, registers);
    for (int64_t i = 0; i < columns; ++i) x[i] = padded_row[i] * by;
  }
  return 1;
#else
  return 0;
#endif
}
