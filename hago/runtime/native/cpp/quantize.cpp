// Real values to stored integers.
#include "quantize.h"

#include <algorithm>

#include "fused.h"
#include "rounding.h"

namespace {

// x / scale, clipped to a little more than the range of a grid, in a third of the time of a division.
//
// The quotient by the reciprocal is corrected twice by what is left of x. The first correction leaves an error of less
// than one unit in the last place, so the second gives the quotient as a division rounds it, since the reciprocal is
// rounded so, too (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990,
// theorem 8.3 of Cornea, Harrison and Tang, "Scientific computing on Itanium-based systems", 2002).
struct ByReciprocal {
  const float scale, by, least, most;

  explicit ByReciprocal(const Grid& g)
      : scale(g.scale), by(1.0f / g.scale), least((1.01f * g.low - 2.0f) * g.scale),
        most((1.01f * g.high + 2.0f) * g.scale) {}
  // Whether there is such an instruction, and neither scales nor what is left of x leave the range of floats.
  static bool is_exact(const Grid& g) {
#ifdef HAGO_FMA
    return g.scale > 0x1p-64f && g.scale < 0x1p64f;
#else
    return false;
#endif
  }
  inline __attribute__((always_inline)) float operator()(float x) const {
    x = x > least ? x : least;  // what is not a number, too
    x = x > most ? most : x;
    float q = x * by;
    q = fused(fused(-scale, q, x), by, q);
    return fused(fused(-scale, q, x), by, q);
  }
};

struct ByDivision {
  const float scale;

  explicit ByDivision(const Grid& g) : scale(g.scale) {}
  inline __attribute__((always_inline)) float operator()(float x) const { return x / scale; }
};

template <int ROUNDING, typename Quotient, typename T>
inline __attribute__((always_inline)) void quantize_each(const float* x, int64_t step, T* __restrict out,
                                                         int64_t out_step, int64_t n, const Grid& g) {
  const Quotient quotient(g);
  for (int64_t i = 0; i < n; ++i) {
    float v = rounded<ROUNDING>(quotient(x[i * step]));
    v = v > g.low ? v : g.low;  // what is not a number, too
    v = v > g.high ? g.high : v;
    out[i * out_step] = (T)((int32_t)v + g.zero);
  }
}

template <int ROUNDING, typename T>
inline __attribute__((always_inline)) void quantize_run(const float* x, int64_t step, T* __restrict out,
                                                        int64_t out_step, int64_t n, const Grid& g) {
  if (ByReciprocal::is_exact(g)) quantize_each<ROUNDING, ByReciprocal>(x, step, out, out_step, n, g);
  else quantize_each<ROUNDING, ByDivision>(x, step, out, out_step, n, g);
}

template <int ROUNDING>
void quantize_as(const float* x, int64_t step, char* out, int64_t at, int64_t out_step, int64_t n, const Grid& g) {
  // bytes side by side, in vectors; int8 and uint8 have the same low bits
  if (step == 1 && out_step == 1 && g.type <= I8) return quantize_run<ROUNDING>(x, 1, (uint8_t*)out + at, 1, n, g);
  if (step == 1 && out_step == 1 && g.type == I32) return quantize_run<ROUNDING>(x, 1, (int32_t*)out + at, 1, n, g);
  if (g.type == U8) return quantize_run<ROUNDING>(x, step, (uint8_t*)out + at, out_step, n, g);
  if (g.type == I8) return quantize_run<ROUNDING>(x, step, (int8_t*)out + at, out_step, n, g);
  if (g.type == I16) return quantize_run<ROUNDING>(x, step, (int16_t*)out + at, out_step, n, g);
  quantize_run<ROUNDING>(x, step, (int32_t*)out + at, out_step, n, g);
}

using Quantizer = void (*)(const float*, int64_t, char*, int64_t, int64_t, int64_t, const Grid&);
constexpr Quantizer QUANTIZE[] = {quantize_as<HALF_EVEN>, quantize_as<HALF_UP>,     quantize_as<HALF_AWAY>,
                                  quantize_as<HALF_DOWN>, quantize_as<TOWARD_ZERO>, quantize_as<FLOOR>};

// Images of three colours to bytes: each colour by itself, then woven.
void quantize_colours(Quantizer quantize, const float* x, int64_t by_channel, uint8_t* out, int64_t n, const Grid& g) {
  uint8_t planes[3 * ROW];
  for (int64_t first = 0; first < n; first += ROW) {
    const int64_t some = std::min<int64_t>(ROW, n - first);
    for (int64_t c = 0; c < 3; ++c) quantize(x + c * by_channel + first, 1, (char*)planes, c * ROW, 1, some, g);
    uint8_t* to = out + 3 * first;
    for (int64_t i = 0; i < some; ++i)
      for (int64_t c = 0; c < 3; ++c) to[3 * i + c] = planes[c * ROW + i];
  }
}

}  // namespace

void quantize_row(const float* x, char* out, int64_t n, const Grid& g) { QUANTIZE[g.rounding](x, 1, out, 0, 1, n, g); }

// Real values to stored integers: N1 of docs/numerics.md. `out` has its channels innermost.
extern "C" void hago_quantize(const float* x, int64_t images, int64_t channels, int64_t pixels, int64_t by_image,
                              int64_t by_channel, int64_t by_pixel, char* out, float scale, float low, float high,
                              int rounding, int type, int zero, int threads) {
  const Grid g{scale, low, high, rounding, type, zero};
  const int64_t pieces = (pixels + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t job = 0; job < images * pieces; ++job) {
    const int64_t image = job / pieces, first = job % pieces * PIECE, n = std::min(PIECE, pixels - first);
    const float* from = x + image * by_image + first * by_pixel;
    const int64_t to = (image * pixels + first) * channels;
    if (channels == 3 && by_pixel == 1 && type <= I8) {
      quantize_colours(QUANTIZE[rounding], from, by_channel, (uint8_t*)out + to, n, g);
      continue;
    }
    for (int64_t c = 0; c < channels; ++c)
      QUANTIZE[rounding](from + c * by_channel, by_pixel, out, to + c, channels, n, g);
  }
}
