// Convolutions of every channel by itself (depthwise), 64 channels of bytes at a time, or 32 of words.
#ifdef __AVX512VNNI__
#include "conv.h"

namespace {

// The bytes of four taps are interleaved, so that
// one dot product adds four taps of 16 channels.
// weight: [block of 64 channels][four taps][4][16 channels, in the order the interleaving leaves][4]
template <bool SIGNED>
void channels(const Job& j, int64_t begin, int64_t end) {
  const Conv& c = j.c;
  const int taps = c.taps, fours = (taps + 3) / 4;
  const bool fast = j.end_form == QUICK;
  const __m512i flip = _mm512_set1_epi8((char)0x80);
  std::vector<const uint8_t*> at(4 * fours, c.zeros);
  alignas(64) int32_t sums[64];
  const std::vector<Place> places = places_of(j, begin, end);
  for (int64_t pixel = begin; pixel < end; ++pixel) {
    const Place& place = places[pixel - begin];
    for (int k = 0; k < taps; ++k)
      at[k] = place.inside ? place.first + j.steps[k] : tap(j, place, k / c.kernel_w, k % c.kernel_w);
    for (int block = 0; block < c.channels; block += 64) {
      const int width = std::min(64, c.channels - block);
      const __mmask64 bytes = first_bytes(width);
      const int8_t* w = c.weight + (int64_t)block / 64 * fours * 256;
      __m512i acc[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
      for (int k = 0; k < 4 * fours; k += 4, w += 256) {
        __m512i t[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          t[i] = _mm512_maskz_loadu_epi8(bytes, at[k + i] + block);
          if (SIGNED) t[i] = _mm512_xor_si512(t[i], flip);
        }
        const __m512i a = _mm512_unpacklo_epi8(t[0], t[1]), b = _mm512_unpackhi_epi8(t[0], t[1]);
        const __m512i d = _mm512_unpacklo_epi8(t[2], t[3]), e = _mm512_unpackhi_epi8(t[2], t[3]);
        acc[0] = _mm512_dpbusd_epi32(acc[0], _mm512_unpacklo_epi16(a, d), _mm512_loadu_si512(w));
        acc[1] = _mm512_dpbusd_epi32(acc[1], _mm512_unpackhi_epi16(a, d), _mm512_loadu_si512(w + 64));
        acc[2] = _mm512_dpbusd_epi32(acc[2], _mm512_unpacklo_epi16(b, e), _mm512_loadu_si512(w + 128));
        acc[3] = _mm512_dpbusd_epi32(acc[3], _mm512_unpackhi_epi16(b, e), _mm512_loadu_si512(w + 192));
      }
      // acc[i] has channels 16 l + 4 i ... + 3 in its l-th quarter: a transposition puts them in order
      const __m512i p = _mm512_shuffle_i32x4(acc[0], acc[1], 0x44), q = _mm512_shuffle_i32x4(acc[2], acc[3], 0x44);
      const __m512i u = _mm512_shuffle_i32x4(acc[0], acc[1], 0xee), v = _mm512_shuffle_i32x4(acc[2], acc[3], 0xee);
      const __m512i in_order[4] = {_mm512_shuffle_i32x4(p, q, 0x88), _mm512_shuffle_i32x4(p, q, 0xdd),
                                   _mm512_shuffle_i32x4(u, v, 0x88), _mm512_shuffle_i32x4(u, v, 0xdd)};
      const Output& o = j.t.output[0];
      __m512i sum[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
        sum[i] = _mm512_add_epi32(in_order[i], _mm512_loadu_si512(c.offset + block + 16 * i));
      if (fast && width == 64) {
        quick_64(sum[0], sum[1], sum[2], sum[3], o, block, pixel * o.stride + block);
        continue;
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __mmask16 lanes = first_lanes(width - 16 * i);
        if (fast && lanes) quick(sum[i], o, block + 16 * i, pixel * o.stride + block + 16 * i, lanes);
        if (!fast) _mm512_store_si512(sums + 16 * i, sum[i]);
      }
      if (!fast) finish_any(j.t, j.plain, {sums, 1, 64, width, block, pixel, block});
    }
  }
}

// The words of two taps are interleaved, so that one dot product adds two taps of 16 channels.
// weight: [block of 32 channels][two taps][2][16 channels, in the order the interleaving leaves][2]
void channels_of_words(const Job& j, int64_t begin, int64_t end) {
  const Conv& c = j.c;
  const int taps = c.taps, twos = (taps + 1) / 2;
  // the first sums have channels 8 l ... + 3 in their l-th quarter, the others 8 l + 4 ... + 7
  const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  std::vector<const uint8_t*> at(2 * twos, c.zeros);
  alignas(64) int32_t sums[32];
  const std::vector<Place> places = places_of(j, begin, end);
  for (int64_t pixel = begin; pixel < end; ++pixel) {
    const Place& place = places[pixel - begin];
    for (int k = 0; k < taps; ++k)
      at[k] = place.inside ? place.first + j.steps[k] : tap(j, place, k / c.kernel_w, k % c.kernel_w);
    for (int block = 0; block < c.out_channels; block += 32) {
      const int width = std::min(32, c.out_channels - block);
      const __mmask32 words = (__mmask32)first_bytes(width);
      const int8_t* w = c.weight + (int64_t)block / 32 * twos * 128;
      __m512i acc[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      for (int k = 0; k < 2 * twos; k += 2, w += 128) {
        const __m512i a = _mm512_maskz_loadu_epi16(words, at[k] + 2 * block);
        const __m512i b = _mm512_maskz_loadu_epi16(words, at[k + 1] + 2 * block);
        acc[0] = _mm512_dpwssd_epi32(acc[0], _mm512_unpacklo_epi16(a, b), _mm512_loadu_si512(w));
        acc[1] = _mm512_dpwssd_epi32(acc[1], _mm512_unpackhi_epi16(a, b), _mm512_loadu_si512(w + 64));
      }
      const __m512i low = _mm512_permutex2var_epi32(acc[0], lower, acc[1]);
      const __m512i high = _mm512_permutex2var_epi32(acc[0], upper, acc[1]);
      _mm512_store_si512(sums, _mm512_add_epi32(low, _mm512_loadu_si512(c.offset + block)));
      _mm512_store_si512(sums + 16, _mm512_add_epi32(high, _mm512_loadu_si512(c.offset + block + 16)));
      finish_any(j.t, j.plain, {sums, 1, 32, width, block, pixel, block});
    }
  }
}

}  // namespace

void by_channel(const Job& j, int64_t begin, int64_t end) {
  if (j.c.values == I16) channels_of_words(j, begin, end);
  else if (j.c.values == I8) channels<true>(j, begin, end);
  else channels<false>(j, begin, end);
}
#endif
