// Sixteen lanes in one register of AVX-512. See lanes.h, which says what the functions do.
#pragma once
#include <immintrin.h>

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
ALWAYS Ints load_packed(const void* at) {
  Ints lanes = _mm512_loadu_si512(at);
  __asm__("" : "+v"(lanes));  // or compilers load it again for every product, of which there is one in a cycle, as of loads
  return lanes;
}

ALWAYS Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
ALWAYS Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
template <int N>
ALWAYS Ints shift_right(Ints a) {
  return _mm512_srai_epi32(a, N);
}
ALWAYS Ints times(Ints a, int32_t b) { return _mm512_mullo_epi32(a, _mm512_set1_epi32(b)); }
ALWAYS Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
ALWAYS Ints smaller(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
ALWAYS Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
ALWAYS Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
ALWAYS Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
ALWAYS Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
ALWAYS Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
ALWAYS Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
ALWAYS Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }

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

ALWAYS void store_64(uint8_t* to, Ints a, Ints b, Ints c, Ints d) {
  const Ints low = all_ints(0xff);
  const Ints ab = _mm512_packus_epi32(_mm512_and_si512(a, low), _mm512_and_si512(b, low));
  const Ints cd = _mm512_packus_epi32(_mm512_and_si512(c, low), _mm512_and_si512(d, low));
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd)));
}

struct ByteRange {
  const __m512i zero, low, high;
  const bool is_signed, whole;  // whole: what a byte holds

  ByteRange(bool is_signed, int zero, int low, int high)
      : zero(_mm512_set1_epi16((int16_t)zero)), low(_mm512_set1_epi16((int16_t)(low + zero))),
        high(_mm512_set1_epi16((int16_t)(high + zero))), is_signed(is_signed),
        whole(low + zero == (is_signed ? -128 : 0) && high + zero == (is_signed ? 127 : 255)) {}
};
// Four registers of which the i-th has lanes 16 l + 4 i ... + 3 in its l-th quarter, from those in order, and back.
ALWAYS void turn_quarters(Ints (&q)[4]) {
  const Ints a = _mm512_shuffle_i32x4(q[0], q[1], 0x44), b = _mm512_shuffle_i32x4(q[2], q[3], 0x44);
  const Ints c = _mm512_shuffle_i32x4(q[0], q[1], 0xee), d = _mm512_shuffle_i32x4(q[2], q[3], 0xee);
  q[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  q[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  q[2] = _mm512_shuffle_i32x4(c, d, 0x88);
  q[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// QUARTERS: lanes lie as `turn_quarters` leaves them.
template <int V, bool QUARTERS = false>
ALWAYS void store_bytes(uint8_t* to, const Ints (&q)[V], int width, const ByteRange& r) {
  const Ints a = q[0], b = q[V > 1], c = V > 2 ? q[V > 2 ? 2 : 0] : a, d = V > 3 ? q[V - 1] : b;
  Ints ab = _mm512_adds_epi16(_mm512_packs_epi32(a, b), r.zero), cd = ab;
  if (V > 2) cd = _mm512_adds_epi16(_mm512_packs_epi32(c, d), r.zero);
  if (!r.whole) {
    ab = _mm512_min_epi16(_mm512_max_epi16(ab, r.low), r.high);
    cd = _mm512_min_epi16(_mm512_max_epi16(cd, r.low), r.high);
  }
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  Ints bytes = r.is_signed ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  if (!QUARTERS) bytes = _mm512_permutexvar_epi32(order, bytes);
  if (V == 4 && width == 64) return _mm512_storeu_si512(to, bytes);
  if (V > 2) _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(bytes));
  if (V == 2) _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(bytes));
  if (V == 4) _mm_storeu_si128((__m128i*)(to + 32), _mm512_extracti32x4_epi32(bytes, 2));
  const __m128i last = _mm512_extracti32x4_epi32(bytes, V - 1);
  if (width == 16 * V) _mm_storeu_si128((__m128i*)(to + 16 * (V - 1)), last);
  else _mm_storel_epi64((__m128i*)(to + 16 * (V - 1)), last);
}

ALWAYS Ints doubling_high(Ints c, Ints m) {
  const __m512i half = _mm512_set1_epi64(1 << 30);
  const __m512i even = _mm512_add_epi64(_mm512_mul_epi32(c, m), half);
  const __m512i odd = _mm512_mul_epi32(_mm512_srli_epi64(c, 32), _mm512_srli_epi64(m, 32));
  return _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 31), _mm512_slli_epi64(_mm512_add_epi64(odd, half), 1));
}
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  const __m512i one = _mm512_set1_epi64(1), n_even = _mm512_and_si512(n, _mm512_set1_epi64(0xff));
  const __m512i n_odd = _mm512_srli_epi64(n, 32);
  const __m512i even = _mm512_add_epi64(_mm512_mul_epi32(c, m), _mm512_sllv_epi64(one, _mm512_sub_epi64(n_even, one)));
  const __m512i odd = _mm512_add_epi64(_mm512_mul_epi32(_mm512_srli_epi64(c, 32), _mm512_srli_epi64(m, 32)),
                                       _mm512_sllv_epi64(one, _mm512_sub_epi64(n_odd, one)));
  const Ints high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  return _mm512_srav_epi32(high, subtract(n, all_ints(32)));
}
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
ALWAYS Vec all_words(int16_t v) { return _mm512_set1_epi16(v); }
ALWAYS Vec add_words(Vec a, Vec b) { return _mm512_add_epi16(a, b); }
ALWAYS Vec subtract_words(Vec a, Vec b) { return _mm512_sub_epi16(a, b); }
ALWAYS Vec widen_vec(const uint8_t* at) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)at)); }
ALWAYS Vec widen_vec(const int8_t* at) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)at)); }
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

#ifdef __AVX512VNNI__
#define HAGO_AVX512_VNNI
constexpr Dots DOTS_BYTES = EXACTLY;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) { return _mm512_dpbusd_epi32(sum, a, b); }
#else
constexpr Dots DOTS_BYTES = NEVER;
ALWAYS Ints dot_bytes(Ints sum, Ints, Ints) { return sum; }
#endif
constexpr bool TURNS_UNSIGNED = false;
ALWAYS Ints turn(Ints a) { return _mm512_xor_si512(a, _mm512_set1_epi8((char)0x80)); }
