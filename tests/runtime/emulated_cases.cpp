// Compares intrinsics of emulated_x86.h with the instructions of AVX2 that do the same to each half of a register, on
// random and extreme lanes. See test_emulated_sets.py.
#include <cstdio>
#include <random>

#include "emulated_x86.h"

namespace {

std::mt19937 source(1);

template <typename T>
T pick(std::initializer_list<T> values) {
  return values.begin()[source() % values.size()];
}

// Lanes of 32 bits of which some are ends of ranges, numbers to shift by, or floats that are rounded or are none.
__m512i drawn() {
  return emulated_each<uint32_t>([](int) -> uint32_t {
    const float special = pick({0.5f, 1.5f, 2.5f, -0.5f, -2.5f, -0.0f, 0x1p31f, -0x1p31f, 0x1.fffffep30f, 8388609.5f, NAN,
                                INFINITY, -INFINITY});
    switch (source() % 6) {
      case 0: return pick({0u, 1u, 0xffffffffu, 0x7fffffffu, 0x80000000u, 0x80008000u, 0x7fff7fffu, 0x80ff7f00u});
      case 1: return source() % 70;
      case 2: return emulated_cast<uint32_t>(special);
      case 3: return emulated_cast<uint32_t>((float)(int32_t)source() / 65536.0f);
      default: return source();
    }
  });
}

int64_t wrong = 0;

template <typename T, typename V>
void compare(const char* name, const V& found, const V& exact) {
  const Emulated<T, V> x(found), y(exact);
  for (int i = 0; i < x.COUNT; ++i) {
    const bool none = std::is_same<T, float>::value && x[i] != x[i] && y[i] != y[i];
    if (none || !std::memcmp(&x[i], &y[i], sizeof(T))) continue;
    if (!wrong++) std::printf("%s differs in lane %d\n", name, i);
  }
}

template <typename H, typename W>
H half(const W& v, int which) {
  H out;
  std::memcpy(&out, (const char*)&v + which * sizeof(H), sizeof(H));
  return out;
}

template <typename W, typename H>
W joined(const H& low, const H& high) {
  W out;
  std::memcpy(&out, &low, sizeof(H));
  std::memcpy((char*)&out + sizeof(H), &high, sizeof(H));
  return out;
}

template <typename F>
__m512i by_halves(const __m512i& a, const __m512i& b, F f) {
  return joined<__m512i>(f(half<__m256i>(a, 0), half<__m256i>(b, 0)), f(half<__m256i>(a, 1), half<__m256i>(b, 1)));
}

template <typename F>
__m512 by_halves_of_floats(const __m512& a, const __m512& b, F f) {
  return joined<__m512>(f(half<__m256>(a, 0), half<__m256>(b, 0)), f(half<__m256>(a, 1), half<__m256>(b, 1)));
}

#define OF_TWO(NAME, NARROW)                                    \
  compare<int32_t>(#NAME, emulated_mm512_##NAME(a, b),          \
                   by_halves(a, b, [](__m256i x, __m256i y) { return _mm256_##NARROW(x, y); }));
#define OF_FLOATS(NAME)                                         \
  compare<float>(#NAME, emulated_mm512_##NAME(f, g),            \
                 by_halves_of_floats(f, g, [](__m256 x, __m256 y) { return _mm256_##NAME(x, y); }));
#define SHIFT(NAME, N)                                          \
  compare<int32_t>(#NAME, emulated_mm512_##NAME(a, N),          \
                   by_halves(a, b, [](__m256i x, __m256i) { return _mm256_##NAME(x, N); }));
#define WIDENED(NAME, FROM)                                                                     \
  compare<int32_t>(#NAME, emulated_mm512_##NAME(half<FROM>(a, 0)),                              \
                   joined<__m512i>(_mm256_##NAME(first_half(half<FROM>(a, 0))), _mm256_##NAME(last_half(half<FROM>(a, 0)))));

__m128i first_half(const __m256i& v) { return half<__m128i>(v, 0); }
__m128i last_half(const __m256i& v) { return half<__m128i>(v, 1); }
__m128i first_half(const __m128i& v) { return v; }
__m128i last_half(const __m128i& v) { return _mm_srli_si128(v, 8); }

void of_two(const __m512i& a, const __m512i& b) {
  OF_TWO(and_si512, and_si256) OF_TWO(xor_si512, xor_si256)
  OF_TWO(add_epi16, add_epi16) OF_TWO(sub_epi16, sub_epi16) OF_TWO(add_epi32, add_epi32) OF_TWO(sub_epi32, sub_epi32)
  OF_TWO(mullo_epi32, mullo_epi32)
  OF_TWO(add_epi64, add_epi64) OF_TWO(sub_epi64, sub_epi64) OF_TWO(adds_epi16, adds_epi16) OF_TWO(subs_epi8, subs_epi8)
  OF_TWO(min_epi16, min_epi16) OF_TWO(max_epi16, max_epi16) OF_TWO(min_epi32, min_epi32) OF_TWO(max_epi32, max_epi32)
  OF_TWO(sllv_epi32, sllv_epi32) OF_TWO(sllv_epi64, sllv_epi64) OF_TWO(srav_epi32, srav_epi32)
  OF_TWO(mul_epi32, mul_epi32) OF_TWO(madd_epi16, madd_epi16) OF_TWO(shuffle_epi8, shuffle_epi8)
  OF_TWO(unpacklo_epi8, unpacklo_epi8) OF_TWO(unpackhi_epi8, unpackhi_epi8)
  OF_TWO(unpacklo_epi16, unpacklo_epi16) OF_TWO(unpackhi_epi16, unpackhi_epi16)
  OF_TWO(packs_epi32, packs_epi32) OF_TWO(packus_epi32, packus_epi32)
  OF_TWO(packs_epi16, packs_epi16) OF_TWO(packus_epi16, packus_epi16)
}

void of_one(const __m512i& a, const __m512i& b) {
  SHIFT(slli_epi64, 0) SHIFT(slli_epi64, 33) SHIFT(slli_epi64, 64) SHIFT(srli_epi64, 31) SHIFT(srli_epi64, 32)
  SHIFT(srli_epi32, 1) SHIFT(srli_epi32, 31) SHIFT(srli_epi32, 32) SHIFT(srai_epi32, 2) SHIFT(srai_epi32, 40)
  WIDENED(cvtepu8_epi32, __m128i) WIDENED(cvtepi8_epi32, __m128i)
  WIDENED(cvtepi16_epi32, __m256i) WIDENED(cvtepu8_epi16, __m256i) WIDENED(cvtepi8_epi16, __m256i)
}

void of_floats(const __m512i& a, const __m512i& b) {
  const __m512 f = emulated_mm512_castsi512_ps(a), g = emulated_mm512_castsi512_ps(b);
  OF_FLOATS(add_ps) OF_FLOATS(mul_ps) OF_FLOATS(div_ps) OF_FLOATS(min_ps) OF_FLOATS(max_ps)
  compare<int32_t>("cvtps_epi32", emulated_mm512_cvtps_epi32(f), by_halves(a, a, [](__m256i x, __m256i) {
                     return _mm256_cvtps_epi32(_mm256_castsi256_ps(x));
                   }));
  compare<float>("cvtepi32_ps", emulated_mm512_cvtepi32_ps(a),
                 joined<__m512>(_mm256_cvtepi32_ps(half<__m256i>(a, 0)), _mm256_cvtepi32_ps(half<__m256i>(a, 1))));
}

// Those that AVX2 has in other words, or only in part.
void of_masks(const __m512i& a, const __m512i& b) {
  const __m256i greater[2] = {_mm256_cmpgt_epi32(half<__m256i>(a, 0), half<__m256i>(b, 0)),
                              _mm256_cmpgt_epi32(half<__m256i>(a, 1), half<__m256i>(b, 1))};
  const int masks[2] = {_mm256_movemask_ps(_mm256_castsi256_ps(greater[0])),
                        _mm256_movemask_ps(_mm256_castsi256_ps(greater[1]))};
  const __mmask16 k = emulated_mm512_cmpgt_epi32_mask(a, b);
  wrong += k != (masks[0] | masks[1] << 8);
  const __m512i blended = joined<__m512i>(_mm256_blendv_epi8(half<__m256i>(a, 0), half<__m256i>(b, 0), greater[0]),
                                          _mm256_blendv_epi8(half<__m256i>(a, 1), half<__m256i>(b, 1), greater[1]));
  compare<int32_t>("mask_blend_epi32", emulated_mm512_mask_blend_epi32(k, a, b), blended);
  int32_t kept[16] = {}, stored[16] = {};
  emulated_mm512_mask_storeu_epi32(kept, k, a);
  _mm256_maskstore_epi32(stored, greater[0], half<__m256i>(a, 0));
  _mm256_maskstore_epi32(stored + 8, greater[1], half<__m256i>(a, 1));
  compare<int32_t>("mask_storeu_epi32", emulated_mm512_loadu_si512(kept), emulated_mm512_loadu_si512(stored));
  compare<int32_t>("maskz_loadu_epi32", emulated_mm512_maskz_loadu_epi32(k, &a), emulated_mm512_loadu_si512(stored));
  const __m512i twice = joined<__m512i>(half<__m256i>(a, 0), half<__m256i>(a, 0));
  const __m512i eighth = emulated_mm512_and_si512(b, emulated_mm512_set1_epi32(7));
  compare<int32_t>("permutexvar_epi32", emulated_mm512_permutexvar_epi32(eighth, twice),
                   by_halves(twice, eighth, [](__m256i x, __m256i p) { return _mm256_permutevar8x32_epi32(x, p); }));
  // bytes below 64, of which 16 bits hold the sums of two products
  const __m512i low = emulated_mm512_and_si512(a, emulated_mm512_set1_epi8(63));
  const __m512i dots = by_halves(low, b, [](__m256i x, __m256i y) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1));
  });
  compare<int32_t>("dpbusd_epi32", emulated_mm512_dpbusd_epi32(a, low, b), emulated_mm512_add_epi32(a, dots));
}

}  // namespace

int main() {
  for (int i = 0; i < 2000; ++i) {
    const __m512i a = drawn(), b = drawn();
    of_two(a, b);
    of_one(a, b);
    of_floats(a, b);
    of_masks(a, b);
  }
  std::printf("%lld lanes differ\n", (long long)wrong);
  return wrong != 0;
}
