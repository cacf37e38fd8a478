// Sixteen lanes in two registers of AVX2. See lanes.h, which says what the functions do.
#pragma once
#include <immintrin.h>

constexpr int WIDEST = 16, TALLEST = 6;
struct Ints {
  __m256i low, high;
};
struct Floats {
  __m256 low, high;
};

ALWAYS Ints all_ints(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
ALWAYS Floats all_floats(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
ALWAYS Floats load_floats(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
ALWAYS Ints load_packed(const void* at) {
  return {_mm256_loadu_si256((const __m256i*)at), _mm256_loadu_si256((const __m256i*)at + 1)};
}

ALWAYS Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
ALWAYS Ints subtract(Ints a, Ints b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
template <int N>
ALWAYS Ints shift_right(Ints a) {
  return {_mm256_srai_epi32(a.low, N), _mm256_srai_epi32(a.high, N)};
}
ALWAYS Ints times(Ints a, int32_t b) {
  return {_mm256_mullo_epi32(a.low, _mm256_set1_epi32(b)), _mm256_mullo_epi32(a.high, _mm256_set1_epi32(b))};
}
ALWAYS Ints larger(Ints a, Ints b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
ALWAYS Ints smaller(Ints a, Ints b) { return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)}; }
ALWAYS Floats larger(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
ALWAYS Floats smaller(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
ALWAYS Floats multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
ALWAYS Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
ALWAYS Floats divide(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
ALWAYS Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
ALWAYS Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }

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

// The first eight of sixteen, which rows of 8, 24 or 40 channels end in.
ALWAYS Ints load_8(const uint8_t* at) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)at)), _mm256_setzero_si256()};
}
ALWAYS Ints load_8(const int32_t* at) { return {_mm256_loadu_si256((const __m256i*)at), _mm256_setzero_si256()}; }
ALWAYS void store_8(int32_t* at, Ints q) { _mm256_storeu_si256((__m256i*)at, q.low); }

#define HAGO_PACKS
struct ByteRange {
  const __m256i zero, low, high;
  const bool is_signed, whole;  // whole: what a byte holds

  ByteRange(bool is_signed, int zero, int low, int high)
      : zero(_mm256_set1_epi16((int16_t)zero)), low(_mm256_set1_epi16((int16_t)(low + zero))),
        high(_mm256_set1_epi16((int16_t)(high + zero))), is_signed(is_signed),
        whole(low + zero == (is_signed ? -128 : 0) && high + zero == (is_signed ? 127 : 255)) {}
};
// Sixteen integers to bytes of a range: in each half of a register the same eight, twice.
ALWAYS __m256i to_bytes(Ints q, const ByteRange& r) {
  __m256i words = _mm256_adds_epi16(_mm256_packs_epi32(q.low, q.high), r.zero);
  if (!r.whole) words = _mm256_min_epi16(_mm256_max_epi16(words, r.low), r.high);
  return r.is_signed ? _mm256_packs_epi16(words, words) : _mm256_packus_epi16(words, words);
}
template <int V>
ALWAYS void store_bytes(uint8_t* to, const Ints (&q)[V], int width, const ByteRange& r) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v, to += 16) {
    const __m128i bytes = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(to_bytes(q[v], r), order));
    if (width >= 16 * (v + 1)) _mm_storeu_si128((__m128i*)to, bytes);
    else _mm_storel_epi64((__m128i*)to, bytes);
  }
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
ALWAYS Ints doubling_high(Ints c, Ints m) { return {doubling_high(c.low, m.low), doubling_high(c.high, m.high)}; }
ALWAYS Ints multiply_shift(Ints c, Ints m, Ints n) {
  return {multiply_shift(c.low, m.low, n.low), multiply_shift(c.high, m.high, n.high)};
}
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
ALWAYS Vec all_words(int16_t v) { return _mm256_set1_epi16(v); }
ALWAYS Vec add_words(Vec a, Vec b) { return _mm256_add_epi16(a, b); }
ALWAYS Vec subtract_words(Vec a, Vec b) { return _mm256_sub_epi16(a, b); }
ALWAYS Vec widen_vec(const uint8_t* at) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at)); }
ALWAYS Vec widen_vec(const int8_t* at) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at)); }
ALWAYS void interleave(Vec a, Vec b, Vec& first, Vec& second) {
  first = _mm256_unpacklo_epi16(a, b);
  second = _mm256_unpackhi_epi16(a, b);
}
ALWAYS void put_in_order(Vec& first, Vec& second) {
  const Vec low = _mm256_permute2x128_si256(first, second, 0x20);
  second = _mm256_permute2x128_si256(first, second, 0x31);
  first = low;
}
#define HAGO_STORES_INTERLEAVED
ALWAYS void put_out_of_order(Vec& first, Vec& second) { put_in_order(first, second); }  // its own inverse
ALWAYS void store_interleaved(uint8_t* to, Vec first, Vec second, const Vec (&ratio)[2], const ByteRange& r) {
  const Floats by{_mm256_castsi256_ps(ratio[0]), _mm256_castsi256_ps(ratio[1])};
  const __m256i bytes = to_bytes(to_ints(multiply(to_floats({first, second}), by)), r);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0x08)));
}

#ifdef __AVXVNNI__
constexpr Dots DOTS_BYTES = EXACTLY;
ALWAYS Ints dot_bytes(Ints sum, Ints a, Ints b) {
  return {_mm256_dpbusd_avx_epi32(sum.low, a.low, b.low), _mm256_dpbusd_avx_epi32(sum.high, a.high, b.high)};
}
#else
#define HAGO_PAIRS
constexpr Dots DOTS_BYTES = IF_PAIRS_FIT;
ALWAYS Ints dot_bytes(Ints sum, Ints, Ints) { return sum; }
template <int N>
ALWAYS __m256i dot_pairs(__m256i sum, const __m256i (&a)[N], const __m256i (&b)[N]) {
  __m256i pairs = _mm256_maddubs_epi16(a[0], b[0]);
#pragma GCC unroll 8
  for (int i = 1; i < N; ++i) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(a[i], b[i]));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
template <int N>
ALWAYS Ints dot_pairs(Ints sum, const Ints (&a)[N], const Ints (&b)[N]) {
  __m256i low[2][N], high[2][N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    low[0][i] = a[i].low, low[1][i] = b[i].low;
    high[0][i] = a[i].high, high[1][i] = b[i].high;
  }
  return {dot_pairs<N>(sum.low, low[0], low[1]), dot_pairs<N>(sum.high, high[0], high[1])};
}
#endif
constexpr bool TURNS_UNSIGNED = false;
ALWAYS Ints turn(Ints a) {
  const __m256i top = _mm256_set1_epi8((char)0x80);
  return {_mm256_xor_si256(a.low, top), _mm256_xor_si256(a.high, top)};
}
