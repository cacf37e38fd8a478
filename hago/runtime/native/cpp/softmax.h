// The softmax of a row of floats, with the bits of torch's.
//
// torch takes exp(x - max) of every entry, sums that up in registers of 16 (AVX-512) or 8 floats (AVX2), which it then
// adds half to half, and multiplies by the reciprocal of the sum. Its exp is that of SLEEF 3 (expf with an error of at
// most 1 ulp: Shibata and Petrogalli, "SLEEF: A portable vectorized library of C standard mathematical functions",
// arXiv:2001.09258). The self-test of the kernels compares the rows with those of the torch that is installed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fused.h"
#include "lanes.h"

inline float power_of_two(int32_t n) {
  const int32_t bits = (n + 127) << 23;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// exp(x), x at most 0.
ALWAYS float exponential(float x) {
  const float d = x < -105.0f ? -105.0f : x;
  const float whole = __builtin_rintf(d * 1.442695040888963407f);
  float s = fused(whole, -0.693145751953125f, d);
  s = fused(whole, -1.428606765330187045e-06f, s);
  float u = 0.000198527617612853646278381f;
  u = fused(u, s, 0.00139304355252534151077271f);
  u = fused(u, s, 0.00833336077630519866943359f);
  u = fused(u, s, 0.0416664853692054748535156f);
  u = fused(u, s, 0.166666671633720397949219f);
  u = fused(u, s, 0.5f);
  u = 1.0f + fused(s * s, u, s);
  const int32_t q = (int32_t)whole;
  u = u * power_of_two(q >> 1) * power_of_two(q - (q >> 1));
  return x < -104.0f ? 0.0f : u;
}

// The entries that rows of n have room for: whole registers.
inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// The sum of n entries in registers of W. Those up to padded(n) are 0.
template <int W>
float sum_in_registers(const float* x, int64_t n) {
  float sums[W] = {};
  if (n < W) {
    for (int64_t i = 0; i < n; ++i) sums[0] += x[i];
    return sums[0];
  }
  for (int64_t i = 0; i < n; i += W)
    for (int k = 0; k < W; ++k) sums[k] += x[i + k];
  for (int half = W / 2; half; half /= 2)
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  return sums[0];
}

// exp(x - max) in place, of a row with room for padded(n) entries, of which the others become 0, and the factor that
// makes a softmax of it. Of a row that is -inf everywhere, 0, as torch's _safe_softmax has it.
inline float exponentials(float* x, int64_t n, int registers) {
  const int64_t all = padded(n);
  for (int64_t i = n; i < all; ++i) x[i] = -INFINITY;
  Floats largest = all_floats(-INFINITY);
  for (int64_t i = 0; i < all; i += LANES) largest = larger(load_floats(x + i), largest);
  float each[LANES], most = -INFINITY;
  store_16(each, largest, All{});
  for (float one : each) most = one > most ? one : most;
  if (most == -INFINITY) {
    std::memset(x, 0, all * sizeof(float));
    return 0.0f;
  }
  for (int64_t i = 0; i < all; ++i) x[i] = exponential(x[i] - most);
  return 1.0f / (registers == 16 ? sum_in_registers<16>(x, n) : sum_in_registers<8>(x, n));
}
