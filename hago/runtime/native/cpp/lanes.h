// Sixteen lanes of 32 bits, and what kernels do with them. Each instruction set has a file that defines the same names:
//
// Ints, Floats   sixteen int32 or float32. Sums and products of Ints are modulo 2**32.
// WIDEST         the most lanes that a tile of a convolution has side by side.
// TALLEST        the pixels of the widest tile: its sums fill the registers, but for a few.
// First(n)       the first n lanes, where All{} are all of them. What is not loaded is 0.
// load_16, store_16   sixteen numbers of a type from and to memory; what is stored keeps its low bits.
// store_64       64 integers to bytes.
// store_bytes    centered integers of V registers to bytes, all or all but the last 8, clipped to a ByteRange.
// to_ints        rounds half to even.
// load_packed    64 bytes as they lie: four bytes or two words for each lane of a dot product.
// all_packed     the same four bytes in every lane.
// dot_words      adds the products of two pairs of words to each lane.
// dot_bytes      adds the products of four unsigned bytes of a by four signed ones of b, where DOTS_BYTES is EXACTLY; of
//                signed by signed ones, where TURNS_UNSIGNED.
// dot_pairs<N>   adds N times as many. Its sums of N pairs of products saturate at 16 bits (VPMADDUBSW), so it is used
//                where no input can bring them there, and DOTS_BYTES is IF_PAIRS_FIT.
// turn           bytes with their highest bit turned: signed ones of unsigned ones less 128, and back.
// doubling_high  (c * m + 2**30) >> 31, where it fits.
// multiply_shift c * m / 2**n, halves up, n from 32 to 62.
// shift_right<N> a / 2**N, where it is whole.
// times          a * b of a number b.
// shift_away     h / 2**n, halves away from zero, n from 0 to 31.
// widen_32       32 bytes to words, less a zero point.
//
// Vec            what one instruction works on: all lanes or a part of them, or WORDS words. load_vec, store_vec move it.
// all_words, add_words, subtract_words, add_vec   of words, and of lanes.
// widen_vec      WORDS bytes as words.
// dot_vec        dot_words of a part.
// interleave     word i of a beside word i of b: of every eight, the first four in `first`, the others in `second`.
// put_in_order   takes sums of such pairs apart again.
// Where HAGO_STORES_INTERLEAVED:
// put_out_of_order    the inverse.
// store_interleaved   such sums, by ratios that were put out of order like them, to bytes in the order of memory.
#pragma once
#include <cstdint>
#include <cstring>

#define ALWAYS inline __attribute__((always_inline))

constexpr int LANES = 16;

struct All {};

enum Dots : int32_t { NEVER = 0, EXACTLY = 1, IF_PAIRS_FIT = 2 };  // products of bytes

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAGO_AVX512
#include "lanes_avx512.h"
#elif defined(__AVX2__)
#include "lanes_avx2.h"
#elif defined(__aarch64__)
#include "lanes_neon.h"
#else
#include "lanes_plain.h"
#endif

constexpr int WORDS = sizeof(Vec) / sizeof(int16_t);

ALWAYS Ints load_ints(const int32_t* at) { return load_16(at, All{}); }

// n bytes as words, less a zero point.
template <typename T>
inline void widen(const T* from, int64_t n, int32_t zero, int16_t* to) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) widen_32(from + i, (int16_t)zero, to + i);
  for (; i < n; ++i) to[i] = (int16_t)(from[i] - zero);
}

ALWAYS Ints all_packed(const void* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return all_ints(four);
}

#ifndef HAGO_AVX512
// ---------------------------------------------------------------- what AVX-512 has instructions for
struct First {
  int lanes;

  explicit First(int n) : lanes(n < 0 ? 0 : n > LANES ? LANES : n) {}
};

template <typename T>
ALWAYS Ints load_some(const T* at, int n) {
  T there[LANES] = {};
  std::memcpy(there, at, n * sizeof(T));
  return load_16(there, All{});
}
template <typename T, typename Lanes>
ALWAYS void store_some(T* at, Lanes q, int n) {
  T there[LANES];
  store_16(there, q, All{});
  std::memcpy(at, there, n * sizeof(T));
}
// Eight numbers, in which rows of 8, 24 or 40 channels end: a copy of constant size takes no call.
template <typename T>
ALWAYS Ints load_8(const T* at) {
  return load_some(at, LANES / 2);
}
template <typename T, typename Lanes>
ALWAYS void store_8(T* at, Lanes q) {
  store_some(at, q, LANES / 2);
}
template <typename T>
ALWAYS Ints load_16(const T* at, First f) {
  return f.lanes == LANES / 2 ? load_8(at) : load_some(at, f.lanes);
}
template <typename T, typename Lanes>
ALWAYS void store_16(T* at, Lanes q, First f) {
  if (f.lanes == LANES / 2) store_8(at, q);
  else store_some(at, q, f.lanes);
}
ALWAYS void store_64(uint8_t* to, Ints a, Ints b, Ints c, Ints d) {
  store_16(to, a, All{});
  store_16(to + 16, b, All{});
  store_16(to + 32, c, All{});
  store_16(to + 48, d, All{});
}
#ifndef HAGO_PACKS
struct ByteRange {
  const Ints zero, low, high;

  ByteRange(bool, int zero, int low, int high) : zero(all_ints(zero)), low(all_ints(low)), high(all_ints(high)) {}
  Ints operator()(Ints c) const { return add(smaller(larger(c, low), high), zero); }
};
template <int V>
ALWAYS void store_bytes(uint8_t* to, const Ints (&q)[V], int width, const ByteRange& r) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    if (width >= 16 * (v + 1)) store_16(to + 16 * v, r(q[v]), All{});
    else store_16(to + 16 * v, r(q[v]), First(width - 16 * v));
  }
}
#endif
#endif

#ifndef HAGO_PAIRS
template <int N>
ALWAYS Ints dot_pairs(Ints sum, const Ints (&)[N], const Ints (&)[N]) {
  return sum;
}
#endif

// The same of convolutions of every channel by itself, see depthwise.cpp.
#ifdef HAGO_AVX512_VNNI
constexpr Dots DOTS_BYTES_BY_CHANNEL = EXACTLY;
#else
constexpr Dots DOTS_BYTES_BY_CHANNEL = NEVER;
#endif

// Matrix tiles (AMX), see tiles.cpp.
#if defined(HAGO_AVX512_VNNI) && defined(__AMX_INT8__) && defined(__AVX512VBMI__)
#define HAGO_TILES
#endif
