// Intrinsics of AVX-512, AVX-VNNI and AMX in plain C++, lane by lane as Intel's Intrinsics Guide has them, so that kernels
// for these instruction sets can be tested on processors without them. `test_other_processors.py` puts "emulated" before
// the names of these intrinsics in copies of the kernels, and includes this file before them.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#ifdef EMULATES_AVX512
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#endif
#ifdef EMULATES_AVX512VNNI
#define __AVX512VNNI__ 1
#endif
#ifdef EMULATES_AVX512VBMI
#define __AVX512VBMI__ 1
#endif
#ifdef EMULATES_AMX
#define __AMX_INT8__ 1
#endif
#ifdef EMULATES_AVXVNNI
#define __AVXVNNI__ 1
#endif

// ---------------------------------------------------------------- lanes
template <typename T, typename V>
struct Emulated {
  static constexpr int COUNT = sizeof(V) / sizeof(T), QUARTER = 16 / sizeof(T);
  T lane[COUNT];

  Emulated() : lane{} {}
  Emulated(const V& v) { std::memcpy(lane, &v, sizeof(V)); }
  V whole() const {
    V v;
    std::memcpy(&v, lane, sizeof(V));
    return v;
  }
  T& operator[](int i) { return lane[i]; }
  const T& operator[](int i) const { return lane[i]; }
};
template <typename T>
using Lanes512 = Emulated<T, __m512i>;
using Lanes512ps = Emulated<float, __m512>;

// Lane i of the result is f(i).
template <typename T, typename V = __m512i, typename F>
V emulated_each(F f) {
  Emulated<T, V> out;
  for (int i = 0; i < out.COUNT; ++i) out[i] = (T)f(i);
  return out.whole();
}

template <typename T, typename F>
__m512i emulated_of_one(const __m512i& a, F f) {
  const Lanes512<T> x(a);
  return emulated_each<T>([&](int i) { return f(x[i]); });
}

template <typename T, typename F>
__m512i emulated_of_two(const __m512i& a, const __m512i& b, F f) {
  const Lanes512<T> x(a), y(b);
  return emulated_each<T>([&](int i) { return f(x[i], y[i]); });
}

template <typename F>
__m512 emulated_of_floats(const __m512& a, const __m512& b, F f) {
  const Lanes512ps x(a), y(b);
  return emulated_each<float, __m512>([&](int i) { return f(x[i], y[i]); });
}

template <typename T>
T emulated_saturated(int64_t v) {
  using Ends = std::numeric_limits<T>;
  return (T)std::min<int64_t>(std::max<int64_t>(v, Ends::min()), Ends::max());
}

// ---------------------------------------------------------------- memory
inline __m512i emulated_mm512_loadu_si512(const void* at) {
  __m512i v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}
inline __m512i emulated_mm512_load_si512(const void* at) {
  if ((uintptr_t)at % 64) std::abort();
  return emulated_mm512_loadu_si512(at);
}
inline void emulated_mm512_storeu_si512(void* at, const __m512i& v) { std::memcpy(at, &v, sizeof(v)); }
inline void emulated_mm512_store_si512(void* at, const __m512i& v) {
  if ((uintptr_t)at % 64) std::abort();
  emulated_mm512_storeu_si512(at, v);
}
inline __m512 emulated_mm512_loadu_ps(const void* at) {
  __m512 v;
  std::memcpy(&v, at, sizeof(v));
  return v;
}
inline void emulated_mm512_storeu_ps(void* at, const __m512& v) { std::memcpy(at, &v, sizeof(v)); }

// What the mask leaves out is neither read nor written.
template <typename T, typename V>
V emulated_masked_load(uint64_t mask, const void* at) {
  return emulated_each<T, V>([&](int i) {
    T lane{};
    if (mask >> i & 1) std::memcpy(&lane, (const char*)at + i * sizeof(T), sizeof(T));
    return lane;
  });
}
template <typename T, typename V>
void emulated_masked_store(void* at, uint64_t mask, const V& v) {
  const Emulated<T, V> x(v);
  for (int i = 0; i < x.COUNT; ++i)
    if (mask >> i & 1) std::memcpy((char*)at + i * sizeof(T), &x[i], sizeof(T));
}
inline __m512i emulated_mm512_maskz_loadu_epi8(__mmask64 k, const void* at) {
  return emulated_masked_load<int8_t, __m512i>(k, at);
}
inline __m512i emulated_mm512_maskz_loadu_epi32(__mmask16 k, const void* at) {
  return emulated_masked_load<int32_t, __m512i>(k, at);
}
inline __m256i emulated_mm256_maskz_loadu_epi8(__mmask32 k, const void* at) {
  return emulated_masked_load<int8_t, __m256i>(k, at);
}
inline __m256i emulated_mm256_maskz_loadu_epi16(__mmask16 k, const void* at) {
  return emulated_masked_load<int16_t, __m256i>(k, at);
}
inline __m128i emulated_mm_maskz_loadu_epi8(__mmask16 k, const void* at) {
  return emulated_masked_load<int8_t, __m128i>(k, at);
}
inline void emulated_mm512_mask_storeu_epi32(void* at, __mmask16 k, const __m512i& v) {
  emulated_masked_store<int32_t>(at, k, v);
}
inline void emulated_mm512_mask_storeu_ps(void* at, __mmask16 k, const __m512& v) {
  emulated_masked_store<float>(at, k, v);
}
inline void emulated_mm256_mask_storeu_epi16(void* at, __mmask16 k, const __m256i& v) {
  emulated_masked_store<int16_t>(at, k, v);
}
inline void emulated_mm_mask_storeu_epi8(void* at, __mmask16 k, const __m128i& v) {
  emulated_masked_store<int8_t>(at, k, v);
}

// ---------------------------------------------------------------- constants and casts
inline __m512i emulated_mm512_setzero_si512() { return __m512i{}; }
inline __m512i emulated_mm512_set1_epi8(int8_t v) { return emulated_each<int8_t>([&](int) { return v; }); }
inline __m512i emulated_mm512_set1_epi16(int16_t v) { return emulated_each<int16_t>([&](int) { return v; }); }
inline __m512i emulated_mm512_set1_epi32(int32_t v) { return emulated_each<int32_t>([&](int) { return v; }); }
inline __m512i emulated_mm512_set1_epi64(int64_t v) { return emulated_each<int64_t>([&](int) { return v; }); }
inline __m512 emulated_mm512_set1_ps(float v) { return emulated_each<float, __m512>([&](int) { return v; }); }
template <typename... Ints>
__m512i emulated_mm512_setr_epi32(Ints... values) {
  const int32_t lanes[16] = {values...};
  return emulated_mm512_loadu_si512(lanes);
}
inline __m512i emulated_mm512_broadcast_i32x4(const __m128i& v) {
  const Emulated<int32_t, __m128i> x(v);
  return emulated_each<int32_t>([&](int i) { return x[i % 4]; });
}
template <typename To, typename From>
To emulated_cast(const From& v) {
  To to;
  std::memcpy(&to, &v, sizeof(To));
  return to;
}
inline __m512 emulated_mm512_castsi512_ps(const __m512i& v) { return emulated_cast<__m512>(v); }
inline __m512i emulated_mm512_castps_si512(const __m512& v) { return emulated_cast<__m512i>(v); }
inline __m256i emulated_mm512_castsi512_si256(const __m512i& v) { return emulated_cast<__m256i>(v); }
inline __m128i emulated_mm512_castsi512_si128(const __m512i& v) { return emulated_cast<__m128i>(v); }

// ---------------------------------------------------------------- arithmetic; integers modulo their width
#define EMULATED_OF_TWO(NAME, TYPE, VALUE)                                        \
  inline __m512i emulated_mm512_##NAME(const __m512i& a, const __m512i& b) {      \
    return emulated_of_two<TYPE>(a, b, [](TYPE x, TYPE y) { return VALUE; });     \
  }
EMULATED_OF_TWO(and_si512, uint64_t, x& y)
EMULATED_OF_TWO(xor_si512, uint64_t, x ^ y)
EMULATED_OF_TWO(add_epi16, uint16_t, x + y)
EMULATED_OF_TWO(sub_epi16, uint16_t, x - y)
EMULATED_OF_TWO(add_epi32, uint32_t, x + y)
EMULATED_OF_TWO(mullo_epi32, uint32_t, x* y)
EMULATED_OF_TWO(sub_epi32, uint32_t, x - y)
EMULATED_OF_TWO(add_epi64, uint64_t, x + y)
EMULATED_OF_TWO(sub_epi64, uint64_t, x - y)
EMULATED_OF_TWO(adds_epi16, int16_t, emulated_saturated<int16_t>(x + y))
EMULATED_OF_TWO(subs_epi8, int8_t, emulated_saturated<int8_t>(x - y))
EMULATED_OF_TWO(min_epi16, int16_t, std::min(x, y))
EMULATED_OF_TWO(max_epi16, int16_t, std::max(x, y))
EMULATED_OF_TWO(min_epi32, int32_t, std::min(x, y))
EMULATED_OF_TWO(max_epi32, int32_t, std::max(x, y))
EMULATED_OF_TWO(sllv_epi32, uint32_t, y > 31 ? 0 : x << y)
EMULATED_OF_TWO(sllv_epi64, uint64_t, y > 63 ? 0 : x << y)
EMULATED_OF_TWO(srav_epi32, int32_t, x >> ((uint32_t)y > 31 ? 31 : y))
EMULATED_OF_TWO(mul_epi32, int64_t, (int64_t)(int32_t)x * (int32_t)y)
#undef EMULATED_OF_TWO
#define EMULATED_SHIFT(NAME, TYPE, VALUE)                                     \
  inline __m512i emulated_mm512_##NAME(const __m512i& a, unsigned n) {        \
    return emulated_of_one<TYPE>(a, [n](TYPE x) { return VALUE; });           \
  }
EMULATED_SHIFT(slli_epi64, uint64_t, n > 63 ? 0 : x << n)
EMULATED_SHIFT(srli_epi64, uint64_t, n > 63 ? 0 : x >> n)
EMULATED_SHIFT(srli_epi32, uint32_t, n > 31 ? 0 : x >> n)
EMULATED_SHIFT(srai_epi32, int32_t, x >> std::min(n, 31u))
#undef EMULATED_SHIFT
#define EMULATED_OF_FLOATS(NAME, VALUE)                                       \
  inline __m512 emulated_mm512_##NAME(const __m512& a, const __m512& b) {     \
    return emulated_of_floats(a, b, [](float x, float y) { return VALUE; });  \
  }
EMULATED_OF_FLOATS(add_ps, x + y)
EMULATED_OF_FLOATS(mul_ps, x* y)
EMULATED_OF_FLOATS(div_ps, x / y)
EMULATED_OF_FLOATS(min_ps, x < y ? x : y)
EMULATED_OF_FLOATS(max_ps, x > y ? x : y)
#undef EMULATED_OF_FLOATS
inline __mmask16 emulated_mm512_cmpgt_epi32_mask(const __m512i& a, const __m512i& b) {
  const Lanes512<int32_t> x(a), y(b);
  __mmask16 k = 0;
  for (int i = 0; i < 16; ++i) k |= (x[i] > y[i]) << i;
  return k;
}
inline __m512i emulated_mm512_mask_blend_epi32(__mmask16 k, const __m512i& a, const __m512i& b) {
  const Lanes512<int32_t> x(a), y(b);
  return emulated_each<int32_t>([&](int i) { return k >> i & 1 ? y[i] : x[i]; });
}
inline __m512i emulated_mm512_mask_add_epi32(const __m512i& from, __mmask16 k, const __m512i& a, const __m512i& b) {
  return emulated_mm512_mask_blend_epi32(k, from, emulated_mm512_add_epi32(a, b));
}

// Products of 4 or 2 neighbours, added to the lane of 32 bits that they stand in.
template <typename V, typename A, typename B>
V emulated_dot(const V& sum, const V& a, const V& b) {
  constexpr int N = 4 / sizeof(A);
  const Emulated<uint32_t, V> sums(sum);
  const Emulated<A, V> x(a);
  const Emulated<B, V> y(b);
  return emulated_each<uint32_t, V>([&](int i) {
    uint32_t total = sums[i];
    for (int j = i * N; j < i * N + N; ++j) total += (uint32_t)(x[j] * y[j]);
    return total;
  });
}
inline __m512i emulated_mm512_dpbusd_epi32(const __m512i& sum, const __m512i& a, const __m512i& b) {
  return emulated_dot<__m512i, uint8_t, int8_t>(sum, a, b);
}
inline __m512i emulated_mm512_dpwssd_epi32(const __m512i& sum, const __m512i& a, const __m512i& b) {
  return emulated_dot<__m512i, int16_t, int16_t>(sum, a, b);
}
inline __m512i emulated_mm512_madd_epi16(const __m512i& a, const __m512i& b) {
  return emulated_dot<__m512i, int16_t, int16_t>(__m512i{}, a, b);
}
inline __m256i emulated_mm256_dpbusd_avx_epi32(const __m256i& sum, const __m256i& a, const __m256i& b) {
  return emulated_dot<__m256i, uint8_t, int8_t>(sum, a, b);
}
inline __m256i emulated_mm256_dpwssd_avx_epi32(const __m256i& sum, const __m256i& a, const __m256i& b) {
  return emulated_dot<__m256i, int16_t, int16_t>(sum, a, b);
}

// ---------------------------------------------------------------- conversions
template <typename To, typename From, typename V, typename W>
V emulated_converted(const W& v) {
  const Emulated<From, W> x(v);
  return emulated_each<To, V>([&](int i) { return x[i]; });
}
inline __m512i emulated_mm512_cvtepu8_epi32(const __m128i& v) { return emulated_converted<int32_t, uint8_t, __m512i>(v); }
inline __m512i emulated_mm512_cvtepi8_epi32(const __m128i& v) { return emulated_converted<int32_t, int8_t, __m512i>(v); }
inline __m512i emulated_mm512_cvtepi16_epi32(const __m256i& v) { return emulated_converted<int32_t, int16_t, __m512i>(v); }
inline __m512i emulated_mm512_cvtepu8_epi16(const __m256i& v) { return emulated_converted<int16_t, uint8_t, __m512i>(v); }
inline __m512i emulated_mm512_cvtepi8_epi16(const __m256i& v) { return emulated_converted<int16_t, int8_t, __m512i>(v); }
inline __m128i emulated_mm512_cvtepi32_epi8(const __m512i& v) { return emulated_converted<uint8_t, uint32_t, __m128i>(v); }
inline __m256i emulated_mm512_cvtepi32_epi16(const __m512i& v) { return emulated_converted<uint16_t, uint32_t, __m256i>(v); }
inline __m512 emulated_mm512_cvtepi32_ps(const __m512i& v) { return emulated_converted<float, int32_t, __m512>(v); }
inline __m512i emulated_mm512_cvtps_epi32(const __m512& v) {
  const Lanes512ps x(v);
  return emulated_each<int32_t>([&](int i) {  // half to even; what no int32 is becomes the least
    return x[i] >= -0x1p31f && x[i] < 0x1p31f ? (int32_t)std::nearbyint(x[i]) : INT32_MIN;
  });
}

// ---------------------------------------------------------------- places
// Of each quarter, its N-th half (0: the lower) of a and of b, by turns.
template <typename T, int N>
__m512i emulated_unpacked(const __m512i& a, const __m512i& b) {
  const Lanes512<T> x(a), y(b);
  constexpr int Q = Lanes512<T>::QUARTER;
  return emulated_each<T>([&](int i) {
    const int from = i / Q * Q + N * Q / 2 + i % Q / 2;
    return i % 2 ? y[from] : x[from];
  });
}
inline __m512i emulated_mm512_unpacklo_epi8(const __m512i& a, const __m512i& b) { return emulated_unpacked<int8_t, 0>(a, b); }
inline __m512i emulated_mm512_unpackhi_epi8(const __m512i& a, const __m512i& b) { return emulated_unpacked<int8_t, 1>(a, b); }
inline __m512i emulated_mm512_unpacklo_epi16(const __m512i& a, const __m512i& b) { return emulated_unpacked<int16_t, 0>(a, b); }
inline __m512i emulated_mm512_unpackhi_epi16(const __m512i& a, const __m512i& b) { return emulated_unpacked<int16_t, 1>(a, b); }
// Of each quarter, those of a and then those of b, saturated to half as many bits.
template <typename To, typename From>
__m512i emulated_packed(const __m512i& a, const __m512i& b) {
  const Lanes512<From> x(a), y(b);
  constexpr int Q = Lanes512<From>::QUARTER;
  return emulated_each<To>([&](int i) {
    const int from = i / (2 * Q) * Q + i % Q;
    return emulated_saturated<To>(i / Q % 2 ? y[from] : x[from]);
  });
}
inline __m512i emulated_mm512_packs_epi32(const __m512i& a, const __m512i& b) { return emulated_packed<int16_t, int32_t>(a, b); }
inline __m512i emulated_mm512_packus_epi32(const __m512i& a, const __m512i& b) { return emulated_packed<uint16_t, int32_t>(a, b); }
inline __m512i emulated_mm512_packs_epi16(const __m512i& a, const __m512i& b) { return emulated_packed<int8_t, int16_t>(a, b); }
inline __m512i emulated_mm512_packus_epi16(const __m512i& a, const __m512i& b) { return emulated_packed<uint8_t, int16_t>(a, b); }
inline __m512i emulated_mm512_shuffle_i32x4(const __m512i& a, const __m512i& b, int from) {
  const Lanes512<int32_t> x(a), y(b);
  return emulated_each<int32_t>([&](int i) {
    const int place = (from >> (i / 4 * 2) & 3) * 4 + i % 4;
    return i < 8 ? x[place] : y[place];
  });
}
inline __m512i emulated_mm512_shuffle_epi8(const __m512i& a, const __m512i& places) {
  const Lanes512<int8_t> x(a), p(places);
  return emulated_each<int8_t>([&](int i) { return p[i] < 0 ? 0 : x[i / 16 * 16 + p[i] % 16]; });
}
inline __m512i emulated_mm512_permutexvar_epi32(const __m512i& places, const __m512i& a) {
  const Lanes512<int32_t> x(a), p(places);
  return emulated_each<int32_t>([&](int i) { return x[p[i] & 15]; });
}
inline __m512i emulated_mm512_permutex2var_epi32(const __m512i& a, const __m512i& places, const __m512i& b) {
  const Lanes512<int32_t> x(a), y(b), p(places);
  return emulated_each<int32_t>([&](int i) { return p[i] & 16 ? y[p[i] & 15] : x[p[i] & 15]; });
}
inline __m512i emulated_mm512_mask_permutexvar_epi8(const __m512i& from, __mmask64 k, const __m512i& places,
                                                    const __m512i& a) {
  const Lanes512<int8_t> x(a), p(places), left(from);
  return emulated_each<int8_t>([&](int i) { return k >> i & 1 ? x[p[i] & 63] : left[i]; });
}
inline __m128i emulated_mm512_extracti32x4_epi32(const __m512i& a, int quarter) {
  const Lanes512<int32_t> x(a);
  return emulated_each<int32_t, __m128i>([&](int i) { return x[4 * quarter + i]; });
}
inline __m512i emulated_mm512_inserti64x4(const __m512i& a, const __m256i& half, int which) {
  Lanes512<int64_t> x(a);
  std::memcpy(x.lane + 4 * which, &half, sizeof(half));
  return x.whole();
}

// ---------------------------------------------------------------- matrix tiles
struct EmulatedTiles {
  int rows[8], width[8];  // in bytes
  uint8_t data[8][16][64];
};
inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}
inline void emulated_tile_loadconfig(const void* config) {
  EmulatedTiles& t = emulated_tiles();
  const uint8_t* at = static_cast<const uint8_t*>(config);
  if (at[0] != 1) std::abort();
  for (int i = 0; i < 8; ++i) {
    uint16_t width;
    std::memcpy(&width, at + 16 + 2 * i, 2);
    t.width[i] = width, t.rows[i] = at[48 + i];
    if (width > 64 || t.rows[i] > 16) std::abort();
  }
  std::memset(t.data, 0, sizeof(t.data));
}
inline void emulated_tile_release() { std::memset(&emulated_tiles(), 0, sizeof(EmulatedTiles)); }
inline void emulated_tile_loadd(int tile, const void* from, int64_t pitch) {
  EmulatedTiles& t = emulated_tiles();
  std::memset(t.data[tile], 0, sizeof(t.data[tile]));
  for (int r = 0; r < t.rows[tile]; ++r) std::memcpy(t.data[tile][r], (const char*)from + r * pitch, t.width[tile]);
}
inline void emulated_tile_stored(int tile, void* to, int64_t pitch) {
  EmulatedTiles& t = emulated_tiles();
  for (int r = 0; r < t.rows[tile]; ++r) std::memcpy((char*)to + r * pitch, t.data[tile][r], t.width[tile]);
}
inline void emulated_tile_dpbusd(int sums, int a, int b) {
  EmulatedTiles& t = emulated_tiles();
  if (t.rows[sums] != t.rows[a] || t.width[sums] != t.width[b] || t.width[a] != 4 * t.rows[b]) std::abort();
  for (int r = 0; r < t.rows[a]; ++r)
    for (int column = 0; column < t.width[b] / 4; ++column) {
      uint32_t total;
      std::memcpy(&total, t.data[sums][r] + 4 * column, 4);
      for (int k = 0; k < t.width[a]; ++k)
        total += (uint32_t)(t.data[a][r][k] * (int8_t)t.data[b][k / 4][4 * column + k % 4]);
      std::memcpy(t.data[sums][r] + 4 * column, &total, 4);
    }
}

// The system lets every process have tiles.
template <typename... Arguments>
long emulated_syscall(Arguments...) {
  return 0;
}
