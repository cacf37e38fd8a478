// Sixteen lanes of 32 bits, and what kernels do with them, in the registers that the target has: AVX-512, two of AVX2,
// four of NEON, or whatever the compiler makes of plain vectors.
//
// A dot product adds two products of words, or four of bytes, to each lane, modulo 2**32. No step of it saturates:
// VPMADDUBSW, which does, is not used.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ALWAYS inline __attribute__((always_inline))

constexpr int LANES = 16;

// The most lanes that a tile of a convolution has side by side, and the pixels of such a tile: as many sums as the
// registers hold beside two more.

// All lanes, or the first ones.
struct All {};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
// ---------------------------------------------------------------- AVX-512
#define HAGO_AVX512
constexpr int WIDEST = 64, TALLEST = 6;
using Ints = __m512i;
using Floats = __m512;

struct First {
  __mmask16 lanes;

  explicit First(int n) : lanes(n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1) {}
};

ALWAYS Ints all_ints(int32_t v) { return _mm512_set1_epi32(v); }
ALWAYS Floats all_floats(float v) { return _mm512_set1_ps(v); }
ALWAYS Floats load_floats(const float* at) { return _mm512_loadu_ps(at); }
// Bytes and words without a sign that lie as the lanes of a dot product.
ALWAYS Ints load_packed(const void* at) { return _mm512_loadu_si512(at); }

ALWAYS Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
ALWAYS Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
ALWAYS Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
ALWAYS Ints smaller(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
ALWAYS Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
ALWAYS Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
ALWAYS Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
ALWAYS Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
ALWAYS Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }  // half to even

// Masked stores are slow on some machines, and so are conversions in one instruction with a store.
ALWAYS Ints load_16(const uint8_t* at, All) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at)); }
ALWAYS Ints load_16(const int8_t* at, All) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)); }
ALWAYS Ints load_16(const int16_t* at, All) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)at)); }
ALWAYS Ints load_16(const int32_t* at, All) { return _mm512_loadu_si512(at); }
ALWAYS Ints load_16(const uint8_t* at, First f) { return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(f.lanes, at)); }
ALWAYS Ints load_16(const int8_t* at, First f) { return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(f.lanes, at)); }
ALWAYS Ints load_16(const int16_t* at, First f) { return _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(f.lanes, at)); }
ALWAYS Ints load_16(const int32_t* at, First f) { return _mm512_maskz_loadu_epi32(f.lanes, at); }
ALWAYS void store_16(uint8_t* at, Ints q, All) { _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(q)); }
ALWAYS void store_16(int16_t* at, Ints q, All) { _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(q)); }
ALWAYS void store_16(int32_t* at, Ints q, All) { _mm512_storeu_si512(at, q); }
ALWAYS void store_16(float* at, Floats v, All) { _mm512_storeu_ps(at, v); }
ALWAYS void store_16(uint8_t* at, Ints q, First f) { _mm_mask_storeu_epi8(at, f.lanes, _mm512_cvtepi32_epi8(q)); }
ALWAYS void store_16(int16_t* at, Ints q, First f) { _mm256_mask_storeu_epi16(at, f.lanes, _mm512_cvtepi32_epi16(q)); }
ALWAYS void store_16(int32_t* at, Ints q, First f) { _mm512_mask_storeu_epi32(at, f.lanes, q); }
ALWAYS void store_16(float* at, Floats v, First f) { _mm512_mask_storeu_ps(at, f.lanes, v); }

// 64 integers to bytes, of which each keeps its low one.
ALWAYS void store_64(uint8_t* to, Ints a, Ints b, Ints c, Ints d) {
  const Ints low = all_ints(0xff);
  const Ints ab = _mm512_packus_epi32(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
  const Ints cd = _mm512_packus_epi32(_mm512_and_si512(c, low), _mm512_and_si512(d, low));
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd)));
}

// The same four bytes, or two words, in every lane.
ALWAYS Ints all_packed(const void* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return _mm512_set1_epi32(four);
}

// (c * m + 2**30) >> 31, where it fits.
ALWAYS Ints doubling_high(Ints c, Ints m) {
  const __m512i half = _mm512_set1_epi64(1 << 30);
  const __m512i even = _mm512_add_epi64(_mm512_mul_epi32(c, m), half);
  const __m512i odd = _mm512_mul_epi32(_mm512_srli_epi64(c, 32), _mm512_srli_epi64(m, 32));
  return _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 31), _mm512_slli_epi64(_mm512_add_epi64(odd, half), 1));
}
// c * m / 2**n, halves up, n from 32 to 62.
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  const __m512i one = _mm512_set1_epi64(1), n_even = _mm512_and_si512(n, _mm512_set1_epi64(0xff));
  const __m512i n_odd = _mm512_srli_epi64(n, 32);
  const __m512i even = _mm512_add_epi64(_mm512_mul_epi32(c, m), _mm512_sllv_epi64(one, _mm512_sub_epi64(n_even, one)));
  const __m512i odd = _mm512_add_epi64(_mm512_mul_epi32(_mm512_srli_epi64(c, 32), _mm512_srli_epi64(m, 32)),
                                       _mm512_sllv_epi64(one, _mm512_sub_epi64(n_odd, one)));
  const Ints high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  return _mm512_srav_epi32(high, subtract(n, all_ints(32)));
}
// h / 2**n, halves away from zero, n from 0 to 31.
ALWAYS Ints shift_away(Ints h, Ints n) {
  const Ints one = all_ints(1), mask = subtract(_mm512_sllv_epi32(one, n), one);
  const Ints half = add(_mm512_srli_epi32(mask, 1), _mm512_srli_epi32(h, 31));
  const __mmask16 more = _mm512_cmpgt_epi32_mask(_mm512_and_si512(h, mask), half);
  const Ints down = _mm512_srav_epi32(h, n);
  return _mm512_mask_add_epi32(down, more, down, one);
}

inline __mmask64 first_bytes(int n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

#ifdef __AVX512VNNI__
ALWAYS Ints dot_words(Ints sum, Ints a, Ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
#else
ALWAYS Ints dot_words(Ints sum, Ints a, Ints b) { return add(sum, _mm512_madd_epi16(a, b)); }
#endif

ALWAYS void widen_32(const uint8_t* from, int16_t zero, int16_t* to) {
  const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  _mm512_storeu_si512(to, _mm512_sub_epi16(words, _mm512_set1_epi16(zero)));
}
ALWAYS void widen_32(const int8_t* from, int16_t zero, int16_t* to) {
  const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
  _mm512_storeu_si512(to, _mm512_sub_epi16(words, _mm512_set1_epi16(zero)));
}

using Vec = __m512i;
ALWAYS Vec load_vec(const void* at) { return _mm512_loadu_si512(at); }
ALWAYS void store_vec(void* at, Vec q) { _mm512_storeu_si512(at, q); }
ALWAYS Vec add_vec(Vec a, Vec b) { return _mm512_add_epi32(a, b); }
ALWAYS Vec dot_vec(Vec sum, Vec a, Vec b) { return dot_words(sum, a, b); }
ALWAYS void interleave(Vec a, Vec b, Vec& first, Vec& second) {
  first = _mm512_unpacklo_epi16(a, b);
  second = _mm512_unpackhi_epi16(a, b);
}
ALWAYS void put_in_order(Vec& first, Vec& second) {
  const Ints lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const Ints upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const Ints low = _mm512_permutex2var_epi32(first, lower, second);
  second = _mm512_permutex2var_epi32(first, upper, second);
  first = low;
}

#elif defined(__AVX2__)
// ---------------------------------------------------------------- AVX2
#define HAGO_AVX2
constexpr int WIDEST = 16, TALLEST = 6;
struct Ints {
  __m256i low, high;
};
struct Floats {
  __m256 low, high;
};
struct First {
  int lanes;

  explicit First(int n) : lanes(n < 0 ? 0 : n > LANES ? LANES : n) {}
};

ALWAYS Ints all_ints(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
ALWAYS Floats all_floats(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
ALWAYS Floats load_floats(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
ALWAYS Ints load_packed(const void* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)at + 1)};
}

ALWAYS Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
ALWAYS Ints subtract(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
ALWAYS Ints larger(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
ALWAYS Ints smaller(Ints a, Ints b) { return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)}; }
ALWAYS Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
ALWAYS Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
ALWAYS Floats multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
ALWAYS Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
ALWAYS Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }  // half to even

ALWAYS Ints load_16(const uint8_t* at, All) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)at);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
ALWAYS Ints load_16(const int8_t* at, All) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)at);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
ALWAYS Ints load_16(const int16_t* at, All) {
  const __m128i* words = (const __m128i*)at;
  return {_mm256_cvtepi16_epi32(_mm_loadu_si128(words)), _mm256_cvtepi16_epi32(_mm_loadu_si128(words + 1))};
}
ALWAYS Ints load_16(const int32_t* at, All) { return load_packed(at); }
// 16 integers as words, of which each keeps its low one.
ALWAYS __m256i to_words(Ints q, int32_t low) {
  const __m256i kept = _mm256_set1_epi32(low);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(q.low, kept), _mm256_and_si256(q.high, kept));
  return _mm256_permute4x64_epi64(words, 0xd8);
}
ALWAYS void store_16(uint8_t* at, Ints q, All) {
  const __m256i words = to_words(q, 0xff);
  _mm_storeu_si128((__m128i*)at, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
ALWAYS void store_16(int16_t* at, Ints q, All) { _mm256_storeu_si256((__m256i*)at, to_words(q, 0xffff)); }
ALWAYS void store_16(int32_t* at, Ints q, All) {
  _mm256_storeu_si256((__m256i*)at, q.low);
  _mm256_storeu_si256((__m256i*)at + 1, q.high);
}
ALWAYS void store_16(float* at, Floats v, All) {
  _mm256_storeu_ps(at, v.low);
  _mm256_storeu_ps(at + 8, v.high);
}

ALWAYS Ints all_packed(const void* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return all_ints(four);
}
ALWAYS void store_64(uint8_t* to, Ints a, Ints b, Ints c, Ints d) {
  store_16(to, a, All{});
  store_16(to + 16, b, All{});
  store_16(to + 32, c, All{});
  store_16(to + 48, d, All{});
}

ALWAYS __m256i doubling_high(__m256i c, __m256i m) {
  const __m256i half = _mm256_set1_epi64x(1 << 30);
  const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(c, m), half);
  const __m256i odd = _mm256_mul_epi32(_mm256_srli_epi64(c, 32), _mm256_srli_epi64(m, 32));
  return _mm256_blend_epi32(_mm256_srli_epi64(even, 31), _mm256_slli_epi64(_mm256_add_epi64(odd, half), 1), 0xaa);
}
ALWAYS __m256i multiply_shift(__m256i c, __m256i m, __m256i n) {
  const __m256i one = _mm256_set1_epi64x(1), n_even = _mm256_and_si256(n, _mm256_set1_epi64x(0xff));
  const __m256i n_odd = _mm256_srli_epi64(n, 32);
  const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(c, m), _mm256_sllv_epi64(one, _mm256_sub_epi64(n_even, one)));
  const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(c, 32), _mm256_srli_epi64(m, 32)),
                                       _mm256_sllv_epi64(one, _mm256_sub_epi64(n_odd, one)));
  const __m256i high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  return _mm256_srav_epi32(high, _mm256_sub_epi32(n, _mm256_set1_epi32(32)));
}
ALWAYS __m256i shift_away(__m256i h, __m256i n) {
  const __m256i one = _mm256_set1_epi32(1), mask = _mm256_sub_epi32(_mm256_sllv_epi32(one, n), one);
  const __m256i half = _mm256_add_epi32(_mm256_srli_epi32(mask, 1), _mm256_srli_epi32(h, 31));
  const __m256i more = _mm256_cmpgt_epi32(_mm256_and_si256(h, mask), half);
  return _mm256_sub_epi32(_mm256_srav_epi32(h, n), more);
}
// (c * m + 2**30) >> 31, where it fits.
ALWAYS Ints doubling_high(Ints c, Ints m) { return {doubling_high(c.low, m.low), doubling_high(c.high, m.high)}; }
// c * m / 2**n, halves up, n from 32 to 62.
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  return {multiply_shift(c.low, m.low, n.low), multiply_shift(c.high, m.high, n.high)};
}
// h / 2**n, halves away from zero, n from 0 to 31.
ALWAYS Ints shift_away(Ints h, Ints n) { return {shift_away(h.low, n.low), shift_away(h.high, n.high)}; }

ALWAYS void widen_16(__m256i words, int16_t zero, int16_t* to) {
  _mm256_storeu_si256((__m256i*)to, _mm256_sub_epi16(words, _mm256_set1_epi16(zero)));
}
ALWAYS void widen_32(const uint8_t* from, int16_t zero, int16_t* to) {
  widen_16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)), zero, to);
  widen_16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from + 1)), zero, to + 16);
}
ALWAYS void widen_32(const int8_t* from, int16_t zero, int16_t* to) {
  widen_16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), zero, to);
  widen_16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from + 1)), zero, to + 16);
}

using Vec = __m256i;
#ifdef __AVXVNNI__
ALWAYS Vec dot_vec(Vec sum, Vec a, Vec b) { return _mm256_dpwssd_avx_epi32(sum, a, b); }
#else
ALWAYS Vec dot_vec(Vec sum, Vec a, Vec b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#endif
ALWAYS Ints dot_words(Ints sum, Ints a, Ints b) {
  return {dot_vec(sum.low, a.low, b.low), dot_vec(sum.high, a.high, b.high)};
}

ALWAYS Vec load_vec(const void* at) { return _mm256_loadu_si256((const __m256i*)at); }
ALWAYS void store_vec(void* at, Vec q) { _mm256_storeu_si256((__m256i*)at, q); }
ALWAYS Vec add_vec(Vec a, Vec b) { return _mm256_add_epi32(a, b); }
ALWAYS void interleave(Vec a, Vec b, Vec& first, Vec& second) {
  first = _mm256_unpacklo_epi16(a, b);
  second = _mm256_unpackhi_epi16(a, b);
}
ALWAYS void put_in_order(Vec& first, Vec& second) {
  const Vec low = _mm256_permute2x128_si256(first, second, 0x20);
  second = _mm256_permute2x128_si256(first, second, 0x31);
  first = low;
}

#elif defined(__aarch64__)
// ---------------------------------------------------------------- NEON
#define HAGO_NEON
constexpr int WIDEST = 16, TALLEST = 5;
struct Ints {
  int32x4_t part[4];
};
struct Floats {
  float32x4_t part[4];
};
struct First {
  int lanes;

  explicit First(int n) : lanes(n < 0 ? 0 : n > LANES ? LANES : n) {}
};

// The same of every part.
template <typename To, typename Part>
ALWAYS To by_parts(Part part) {
  return {part(0), part(1), part(2), part(3)};
}

ALWAYS Ints all_ints(int32_t v) { return by_parts<Ints>([&](int) { return vdupq_n_s32(v); }); }
ALWAYS Floats all_floats(float v) { return by_parts<Floats>([&](int) { return vdupq_n_f32(v); }); }
ALWAYS Floats load_floats(const float* at) { return by_parts<Floats>([&](int i) { return vld1q_f32(at + 4 * i); }); }
ALWAYS Ints load_packed(const void* at) {
  return by_parts<Ints>([&](int i) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)at + 16 * i)); });
}

ALWAYS Ints add(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vaddq_s32(a.part[i], b.part[i]); }); }
ALWAYS Ints subtract(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vsubq_s32(a.part[i], b.part[i]); }); }
ALWAYS Ints larger(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vmaxq_s32(a.part[i], b.part[i]); }); }
ALWAYS Ints smaller(Ints a, Ints b) { return by_parts<Ints>([&](int i) { return vminq_s32(a.part[i], b.part[i]); }); }
ALWAYS Floats larger(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vmaxq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats smaller(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vminq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats multiply(Floats a, Floats b) {
  return by_parts<Floats>([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
}
ALWAYS Floats to_floats(Ints a) { return by_parts<Floats>([&](int i) { return vcvtq_f32_s32(a.part[i]); }); }
ALWAYS Ints to_ints(Floats a) { return by_parts<Ints>([&](int i) { return vcvtnq_s32_f32(a.part[i]); }); }  // half to even

ALWAYS Ints load_16(const int16_t* at, All) {
  return by_parts<Ints>([&](int i) { return vmovl_s16(vld1_s16(at + 4 * i)); });
}
ALWAYS Ints from_words(int16x8_t low, int16x8_t high) {
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
ALWAYS Ints load_16(const uint8_t* at, All) {
  const uint8x16_t bytes = vld1q_u8(at);
  return from_words(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_high_u8(bytes)));
}
ALWAYS Ints load_16(const int8_t* at, All) {
  const int8x16_t bytes = vld1q_s8(at);
  return from_words(vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
}
ALWAYS Ints load_16(const int32_t* at, All) { return load_packed(at); }
// Pairs of parts as words, of which each keeps its low one.
ALWAYS int16x8_t to_words(Ints q, int i) { return vmovn_high_s32(vmovn_s32(q.part[2 * i]), q.part[2 * i + 1]); }
ALWAYS void store_16(uint8_t* at, Ints q, All) {
  vst1q_s8((int8_t*)at, vmovn_high_s16(vmovn_s16(to_words(q, 0)), to_words(q, 1)));
}
ALWAYS void store_16(int16_t* at, Ints q, All) {
  vst1q_s16(at, to_words(q, 0));
  vst1q_s16(at + 8, to_words(q, 1));
}
ALWAYS void store_16(int32_t* at, Ints q, All) {
  for (int i = 0; i < 4; ++i) vst1q_s32(at + 4 * i, q.part[i]);
}
ALWAYS void store_16(float* at, Floats v, All) {
  for (int i = 0; i < 4; ++i) vst1q_f32(at + 4 * i, v.part[i]);
}
ALWAYS void store_64(uint8_t* to, Ints a, Ints b, Ints c, Ints d) {
  store_16(to, a, All{});
  store_16(to + 16, b, All{});
  store_16(to + 32, c, All{});
  store_16(to + 48, d, All{});
}

ALWAYS Ints all_packed(const void* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return all_ints(four);
}

// (c * m + 2**30) >> 31, where it fits.
ALWAYS Ints doubling_high(Ints c, Ints m) {
  return by_parts<Ints>([&](int i) { return vqrdmulhq_s32(c.part[i], m.part[i]); });
}
// c * m / 2**n, halves up, n from 32 to 62.
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  return by_parts<Ints>([&](int i) {
    const int32x4_t x = c.part[i], y = m.part[i], by = vnegq_s32(n.part[i]);
    const int64x2_t low = vrshlq_s64(vmull_s32(vget_low_s32(x), vget_low_s32(y)), vmovl_s32(vget_low_s32(by)));
    const int64x2_t high = vrshlq_s64(vmull_high_s32(x, y), vmovl_high_s32(by));
    return vmovn_high_s64(vmovn_s64(low), high);
  });
}
// h / 2**n, halves away from zero, n from 0 to 31.
ALWAYS Ints shift_away(Ints h, Ints n) {
  return by_parts<Ints>([&](int i) {
    const int32x4_t by = vnegq_s32(n.part[i]), x = h.part[i];
    return vrshlq_s32(vqaddq_s32(x, vshrq_n_s32(vandq_s32(x, by), 31)), by);  // halves of negative ones down
  });
}

ALWAYS void widen_8(int16x8_t words, int16_t zero, int16_t* to) { vst1q_s16(to, vsubq_s16(words, vdupq_n_s16(zero))); }
ALWAYS void widen_32(const uint8_t* from, int16_t zero, int16_t* to) {
  for (int i = 0; i < 32; i += 8) widen_8(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(from + i))), zero, to + i);
}
ALWAYS void widen_32(const int8_t* from, int16_t zero, int16_t* to) {
  for (int i = 0; i < 32; i += 8) widen_8(vmovl_s8(vld1_s8(from + i)), zero, to + i);
}

using Vec = int32x4_t;
ALWAYS Vec load_vec(const void* at) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)at)); }
ALWAYS void store_vec(void* at, Vec q) { vst1q_s32((int32_t*)at, q); }
ALWAYS Vec add_vec(Vec a, Vec b) { return vaddq_s32(a, b); }
ALWAYS Vec dot_vec(Vec sum, Vec a, Vec b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
  return vaddq_s32(sum, vpaddq_s32(low, high));
}
ALWAYS Ints dot_words(Ints sum, Ints a, Ints b) {
  return by_parts<Ints>([&](int i) { return dot_vec(sum.part[i], a.part[i], b.part[i]); });
}
ALWAYS void interleave(Vec a, Vec b, Vec& first, Vec& second) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  first = vreinterpretq_s32_s16(vzip1q_s16(x, y));
  second = vreinterpretq_s32_s16(vzip2q_s16(x, y));
}
ALWAYS void put_in_order(Vec&, Vec&) {}

#else
// ---------------------------------------------------------------- plain vectors
constexpr int WIDEST = 16, TALLEST = 2;
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));
struct First {
  int lanes;

  explicit First(int n) : lanes(n < 0 ? 0 : n > LANES ? LANES : n) {}
};

ALWAYS Ints all_ints(int32_t v) { return v - Ints{}; }
ALWAYS Floats all_floats(float v) { return v - Floats{}; }
ALWAYS Floats load_floats(const float* at) {
  Floats v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}
ALWAYS Ints load_packed(const void* at) {
  Ints v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}

typedef uint32_t Unsigned __attribute__((vector_size(64)));
ALWAYS Ints add(Ints a, Ints b) { return (Ints)((Unsigned)a + (Unsigned)b); }
ALWAYS Ints subtract(Ints a, Ints b) { return (Ints)((Unsigned)a - (Unsigned)b); }
ALWAYS Ints larger(Ints a, Ints b) { return a > b ? a : b; }
ALWAYS Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
ALWAYS Floats larger(Floats a, Floats b) { return a > b ? a : b; }
ALWAYS Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
ALWAYS Floats multiply(Floats a, Floats b) { return a * b; }
ALWAYS Floats to_floats(Ints a) { return __builtin_convertvector(a, Floats); }
ALWAYS Ints to_ints(Floats a) {  // half to even
  Ints q;
  for (int i = 0; i < LANES; ++i) q[i] = (int32_t)__builtin_rintf(a[i]);
  return q;
}

template <typename T>
ALWAYS Ints load_16(const T* at, All) {
  T there[LANES];
  std::memcpy(there, at, sizeof(there));
  Ints v;
  for (int i = 0; i < LANES; ++i) v[i] = there[i];
  return v;
}
template <typename T>
ALWAYS void store_16(T* at, Ints q, All) {
  T there[LANES];
  for (int i = 0; i < LANES; ++i) there[i] = (T)q[i];
  std::memcpy(at, there, sizeof(there));
}
ALWAYS void store_16(float* at, Floats v, All) { std::memcpy(at, &v, sizeof(v)); }
ALWAYS void store_64(uint8_t* to, Ints a, Ints b, Ints c, Ints d) {
  store_16(to, a, All{});
  store_16(to + 16, b, All{});
  store_16(to + 32, c, All{});
  store_16(to + 48, d, All{});
}

ALWAYS Ints all_packed(const void* at) {
  int32_t four;
  std::memcpy(&four, at, 4);
  return all_ints(four);
}
ALWAYS Ints dot_words(Ints sum, Ints a, Ints b) {
  const Ints low = ((a << 16) >> 16) * ((b << 16) >> 16), high = (a >> 16) * (b >> 16);
  return add(sum, add(low, high));
}

// (c * m + 2**30) >> 31, where it fits.
ALWAYS Ints doubling_high(Ints c, Ints m) {
  Ints h;
  for (int i = 0; i < LANES; ++i) h[i] = (int32_t)(((int64_t)c[i] * m[i] + (1 << 30)) >> 31);
  return h;
}
// c * m / 2**n, halves up, n from 32 to 62.
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  Ints q;
  for (int i = 0; i < LANES; ++i) q[i] = (int32_t)(((int64_t)c[i] * m[i] + ((int64_t)1 << (n[i] - 1))) >> n[i]);
  return q;
}
// h / 2**n, halves away from zero, n from 0 to 31.
ALWAYS Ints shift_away(Ints h, Ints n) {
  const Ints mask = (Ints)(((Unsigned)all_ints(1) << (Unsigned)n) - 1u), half = (mask >> 1) - (h >> 31);
  return (h >> n) - ((h & mask) > half);
}

template <typename T>
ALWAYS void widen_32(const T* from, int16_t zero, int16_t* to) {
  for (int i = 0; i < 32; ++i) to[i] = (int16_t)(from[i] - zero);
}

using Vec = Ints;
ALWAYS Vec load_vec(const void* at) { return load_packed(at); }
ALWAYS void store_vec(void* at, Vec q) { std::memcpy(at, &q, sizeof(q)); }
ALWAYS Vec add_vec(Vec a, Vec b) { return add(a, b); }
ALWAYS Vec dot_vec(Vec sum, Vec a, Vec b) { return dot_words(sum, a, b); }
typedef int16_t Halves __attribute__((vector_size(64)));
ALWAYS void interleave(Vec a, Vec b, Vec& first, Vec& second) {
  const Halves x = (Halves)a, y = (Halves)b;
  first = (Ints)__builtin_shuffle(x, y, Halves{0,  32, 1,  33, 2,  34, 3,  35, 8,  40, 9,  41, 10, 42, 11, 43,
                                               16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59});
  second = (Ints)__builtin_shuffle(x, y, Halves{4,  36, 5,  37, 6,  38, 7,  39, 12, 44, 13, 45, 14, 46, 15, 47,
                                                20, 52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63});
}
ALWAYS void put_in_order(Vec& first, Vec& second) {
  const Ints low = __builtin_shuffle(first, second, Ints{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23});
  second = __builtin_shuffle(first, second, Ints{8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31});
  first = low;
}
#endif

// A Vec is what one instruction works on. `interleave` puts word i of a beside word i of b, the first four of every eight in `first`, the others in `second`;
// `put_in_order` takes sums of such pairs apart again.
constexpr int WORDS = sizeof(Vec) / sizeof(int16_t);

// n bytes as words, with a zero point taken out.
template <typename T>
inline void widen(const T* from, int64_t n, int32_t zero, int16_t* to) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) widen_32(from + i, (int16_t)zero, to + i);
  for (; i < n; ++i) to[i] = (int16_t)(from[i] - zero);
}

ALWAYS Ints load_ints(const int32_t* at) { return load_16(at, All{}); }

#ifndef HAGO_AVX512
// ---------------------------------------------------------------- the first lanes, through memory
template <typename T>
ALWAYS Ints load_16(const T* at, First f) {
  T there[LANES] = {};
  std::memcpy(there, at, f.lanes * sizeof(T));
  return load_16(there, All{});
}
template <typename T, typename Lanes>
ALWAYS void store_16(T* at, Lanes q, First f) {
  T there[LANES];
  store_16(there, q, All{});
  std::memcpy(at, there, f.lanes * sizeof(T));
}
#endif

// ---------------------------------------------------------------- bytes
// Whether the target adds four products of unsigned by signed bytes exactly. Elsewhere bytes are widened to words.
#if defined(HAGO_AVX512) && defined(__AVX512VNNI__)
#define HAGO_AVX512_VNNI
constexpr bool DOTS_BYTES = true;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) { return _mm512_dpbusd_epi32(sum, a, b); }
#elif defined(HAGO_AVX2) && defined(__AVXVNNI__)
constexpr bool DOTS_BYTES = true;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  return {_mm256_dpbusd_avx_epi32(sum.low, a.low, b.low), _mm256_dpbusd_avx_epi32(sum.high, a.high, b.high)};
}
#elif defined(HAGO_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool DOTS_BYTES = true;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  return by_parts<Ints>([&](int i) {
    return vusdotq_s32(sum.part[i], vreinterpretq_u8_s32(a.part[i]), vreinterpretq_s8_s32(b.part[i]));
  });
}
#elif defined(HAGO_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define HAGO_SIGNED
constexpr bool DOTS_BYTES = true;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  return by_parts<Ints>([&](int i) {
    return vdotq_s32(sum.part[i], vreinterpretq_s8_s32(a.part[i]), vreinterpretq_s8_s32(b.part[i]));
  });
}
#elif defined(HAGO_PLAIN_BYTES)  // so that what follows from it can be tested on any machine
constexpr bool DOTS_BYTES = true;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  for (int k = 0; k < 4; ++k) {
    const Ints x = (Ints)((Unsigned)a << (24 - 8 * k) >> 24), y = b << (24 - 8 * k) >> 24;
    sum = add(sum, x * y);
  }
  return sum;
}
#else
constexpr bool DOTS_BYTES = false;
ALWAYS Ints dot_bytes(Ints sum, Ints, Ints) { return sum; }
#endif

// Which bytes are read with their highest bit turned, since the product takes the others.
#ifdef HAGO_SIGNED
constexpr bool TURNS_UNSIGNED = true;
#else
constexpr bool TURNS_UNSIGNED = false;
#endif
#ifdef HAGO_NEON
ALWAYS Ints turn(Ints a) {
  return by_parts<Ints>([&](int i) {
    return vreinterpretq_s32_u8(veorq_u8(vreinterpretq_u8_s32(a.part[i]), vdupq_n_u8(0x80)));
  });
}
#elif defined(HAGO_AVX512)
ALWAYS Ints turn(Ints a) { return _mm512_xor_si512(a, _mm512_set1_epi8((char)0x80)); }
#elif defined(HAGO_AVX2)
ALWAYS Ints turn(Ints a) {
  const __m256i top = _mm256_set1_epi8((char)0x80);
  return {_mm256_xor_si256(a.low, top), _mm256_xor_si256(a.high, top)};
}
#else
ALWAYS Ints turn(Ints a) { return a ^ all_ints((int32_t)0x80808080); }
#endif

// The same for convolutions of every channel by itself.
#ifdef HAGO_AVX512_VNNI
constexpr bool DOTS_BYTES_BY_CHANNEL = true;
#else
constexpr bool DOTS_BYTES_BY_CHANNEL = false;
#endif

// Matrix tiles (AMX), see tiles.cpp.
#if defined(HAGO_AVX512_VNNI) && defined(__AMX_INT8__) && defined(__AVX512VBMI__)
#define HAGO_TILES
#endif
