// Bytes through a table of 256, a register at a time where registers of bytes can be shuffled.
#pragma once
#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

inline void look_up_each(const uint8_t* x, const uint8_t* entries, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = entries[x[i]];
}

#ifdef __AVX2__
#ifdef __AVX512BW__
using Bytes = __m512i;
inline Bytes load_bytes(const void* at) { return _mm512_loadu_si512(at); }
inline void store_bytes(void* at, Bytes b) { _mm512_storeu_si512(at, b); }
inline Bytes all_bytes(int b) { return _mm512_set1_epi8((char)b); }
inline Bytes all_sixteen(__m128i b) { return _mm512_broadcast_i32x4(b); }
inline Bytes exclusive_or(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline Bytes less_saturating(Bytes a, Bytes b) { return _mm512_subs_epi8(a, b); }
inline Bytes shuffle(Bytes a, Bytes b) { return _mm512_shuffle_epi8(a, b); }
#else
using Bytes = __m256i;
inline Bytes load_bytes(const void* at) { return _mm256_loadu_si256((const __m256i*)at); }
inline void store_bytes(void* at, Bytes b) { _mm256_storeu_si256((__m256i*)at, b); }
inline Bytes all_bytes(int b) { return _mm256_set1_epi8((char)b); }
inline Bytes all_sixteen(__m128i b) { return _mm256_broadcastsi128_si256(b); }
inline Bytes exclusive_or(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
inline Bytes less_saturating(Bytes a, Bytes b) { return _mm256_subs_epi8(a, b); }
inline Bytes shuffle(Bytes a, Bytes b) { return _mm256_shuffle_epi8(a, b); }
#endif

// A shuffle gives 0 where an index is negative, and otherwise looks its low four bits up among sixteen entries. For the
// bytes below 128, sixteen is taken away again and again, and each time the difference of the next sixteen entries to
// those before is added (modulo 2) where the byte is not negative yet. The others take turns in the same way once 128 is
// taken away; those below saturate at -128 then, and stay negative.
struct Differences {
  Bytes of[16];

  explicit Differences(const uint8_t* entries) {
    for (int i = 0; i < 16; ++i) {
      const __m128i here = _mm_loadu_si128((const __m128i*)(entries + 16 * i));
      const __m128i before = _mm_loadu_si128((const __m128i*)(entries + 16 * (i - (i % 8 > 0))));
      of[i] = all_sixteen(i % 8 ? _mm_xor_si128(here, before) : here);
    }
  }

  Bytes operator()(Bytes x) const {
    const Bytes sixteen = all_bytes(16);
    Bytes low = x, high = exclusive_or(x, all_bytes(0x80));
    Bytes found = exclusive_or(shuffle(of[0], low), shuffle(of[8], high));
#pragma GCC unroll 8
    for (int i = 1; i < 8; ++i) {
      low = less_saturating(low, sixteen), high = less_saturating(high, sixteen);
      found = exclusive_or(found, exclusive_or(shuffle(of[i], low), shuffle(of[8 + i], high)));
    }
    return found;
  }
};

inline void look_up(const uint8_t* x, const uint8_t* entries, uint8_t* out, int64_t n) {
  constexpr int64_t N = sizeof(Bytes);
  if (n < 4 * N) return look_up_each(x, entries, out, n);
  const Differences differences(entries);
  int64_t i = 0;
  for (; i + N <= n; i += N) store_bytes(out + i, differences(load_bytes(x + i)));
  look_up_each(x + i, entries, out + i, n - i);
}
#else
inline void look_up(const uint8_t* x, const uint8_t* entries, uint8_t* out, int64_t n) {
  look_up_each(x, entries, out, n);
}
#endif
