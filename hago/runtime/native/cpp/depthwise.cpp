// Convolutions of every channel by itself (depthwise), 64 channels of bytes at a time, or 32 of words.
#include "conv.h"

namespace {

constexpr int PIXELS = 16;  // whose sums are ended together

#ifdef HAGO_AVX512_VNNI
constexpr int64_t COLUMN = 256;  // bytes of four rows of 64 channels

// Four rows of a column of an image, 64 channels of them, interleaved: one dot product adds four taps of 16 channels.
struct Column {
  __m512i part[4];

  ALWAYS void add_to(__m512i (&acc)[4], const Column& weights) const {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[i] = _mm512_dpbusd_epi32(acc[i], part[i], weights.part[i]);
  }
  ALWAYS static Column at(const void* from) {
    Column c;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) c.part[i] = _mm512_loadu_si512((const char*)from + 64 * i);
    return c;
  }
};

// Pixels of one row of the result, of a block of channels at a time; windows that meet in a column read the same.
// weight: [block of 64 channels][column of a window][four rows][4][16 channels, in the order that leaves][4]
//
// Of at most 32 channels two pixels are worked on at once, half a row apart; the weights of such a block stand there
// twice.
template <bool SIGNED>
class Row {
 public:
  Row(const Job& j, Room& room) : j(j), c(j.c), fours((c.kernel_h + 3) / 4), from(4 * fours), step(4 * fours), room(room) {}

  // `count` pixels from `pixel` on, the first at row `y` and column `x` of the result.
  void operator()(const uint8_t* image, int64_t y, int64_t x, int64_t count, int64_t pixel) {
    for (int k = 0; k < 4 * fours; ++k) {
      const int64_t at = y * c.stride_h - c.pad_h + (int64_t)k * c.dilation_h;
      const bool inside = k < c.kernel_h && at >= 0 && at < j.s.height;
      from[k] = inside ? image + at * j.s.width * c.channels : c.zeros;
      step[k] = inside ? c.channels : 0;
    }
    first = x * c.stride_w - c.pad_w;
    for (block = 0; block < c.channels; block += 64) {
      width = std::min(64, c.channels - block);
      bytes = first_bytes(width);
      const bool twice = width <= 32 && count > 1;
      part = twice ? (count + 1) / 2 : count;
      apart = twice ? part * c.stride_w : 0;
      if (c.kernel_w == 3 && fours == 1 && c.dilation_w == 1 && c.stride_w <= 2)
        c.stride_w == 1 ? by_three<1>(count, pixel) : by_three<2>(count, pixel);
      else
        by_columns(count, pixel);
    }
  }

 private:
  const Job& j;
  const Conv& c;
  const int fours;  // rows of a window are
  std::vector<const uint8_t*> from;  // rows of the image, or zeros
  std::vector<int64_t> step;         // from one column of them to the next
  Room& room;
  int64_t first, part, apart;  // the first column; pixels of a part of the row; columns between two parts
  int block, width;
  __mmask64 bytes;

  ALWAYS const uint8_t* place(int k, int64_t x) const {
    return (uint64_t)x < (uint64_t)j.s.width ? from[k] + x * step[k] + block : c.zeros + block;
  }

  // The column x, and that of the other part.
  ALWAYS Column column(int four, int64_t x) const {
    __m512i t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_maskz_loadu_epi8(bytes, place(4 * four + i, x));
      if (apart) {
        const __m256i other = _mm256_maskz_loadu_epi8((__mmask32)bytes, place(4 * four + i, x + apart));
        t[i] = _mm512_inserti64x4(t[i], other, 1);
      }
      if (SIGNED) t[i] = _mm512_xor_si512(t[i], _mm512_set1_epi8((char)0x80));
    }
    const __m512i a = _mm512_unpacklo_epi8(t[0], t[1]), b = _mm512_unpackhi_epi8(t[0], t[1]);
    const __m512i d = _mm512_unpacklo_epi8(t[2], t[3]), e = _mm512_unpackhi_epi8(t[2], t[3]);
    return {_mm512_unpacklo_epi16(a, d), _mm512_unpackhi_epi16(a, d), _mm512_unpacklo_epi16(b, e),
            _mm512_unpackhi_epi16(b, e)};
  }

  // Windows of three columns, which stay in registers.
  template <int STRIDE>
  void by_three(int64_t count, int64_t pixel) const {
    const int8_t* weight = c.weight + (int64_t)block / 64 * 3 * COLUMN;
    const Column w[3] = {Column::at(weight), Column::at(weight + COLUMN), Column::at(weight + 2 * COLUMN)};
    int64_t x = first;
    Column a = column(0, x++), b = a;
    if (STRIDE == 1) b = column(0, x++);
    each_pixel(count, pixel, [&](int64_t, __m512i(&acc)[4]) __attribute__((always_inline)) {
      if (STRIDE == 2) b = column(0, x++);
      const Column d = column(0, x++);
      a.add_to(acc, w[0]);
      b.add_to(acc, w[1]);
      d.add_to(acc, w[2]);
      a = STRIDE == 1 ? b : d;
      b = d;
    });
  }

  void by_columns(int64_t count, int64_t pixel) const {
    const int64_t columns = (part - 1) * c.stride_w + (c.kernel_w - 1) * c.dilation_w + 1, each = fours * COLUMN;
    uint8_t* held = room.of(columns * each);
    for (int64_t x = 0; x < columns; ++x)
      for (int f = 0; f < fours; ++f) {
        const Column made = column(f, first + x);
        std::memcpy(held + x * each + f * COLUMN, &made, COLUMN);
      }
    const int8_t* weight = c.weight + (int64_t)block / 64 * c.kernel_w * each;
    each_pixel(count, pixel, [&](int64_t p, __m512i(&acc)[4]) __attribute__((always_inline)) {
      for (int k = 0; k < c.kernel_w; ++k)
        for (int f = 0; f < fours; ++f)
          Column::at(held + (p * c.stride_w + k * c.dilation_w) * each + f * COLUMN)
              .add_to(acc, Column::at(weight + k * each + f * COLUMN));
    });
  }

  // Has `sum(p, acc)` add the window of each pixel p of a part, and ends its sums.
  template <typename Sum>
  ALWAYS void each_pixel(int64_t count, int64_t pixel, Sum sum) const {
    const bool twice = apart;
    __m512i offset[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) offset[i] = _mm512_loadu_si512(c.offset + block + 16 * (twice ? i % 2 : i));
    alignas(64) int32_t sums[64 * PIXELS];
    for (int64_t p = 0; p < part; p += PIXELS) {
      const int some = (int)std::min<int64_t>(PIXELS, part - p);
      for (int r = 0; r < some; ++r) {
        __m512i acc[4] = {};
        sum(p + r, acc);
        // acc[i] has channels 16 l + 4 i ... + 3 in its l-th quarter: a transposition puts them in order
        const __m512i m = _mm512_shuffle_i32x4(acc[0], acc[1], 0x44), n = _mm512_shuffle_i32x4(acc[2], acc[3], 0x44);
        const __m512i u = _mm512_shuffle_i32x4(acc[0], acc[1], 0xee), v = _mm512_shuffle_i32x4(acc[2], acc[3], 0xee);
        const __m512i in_order[4] = {_mm512_shuffle_i32x4(m, n, 0x88), _mm512_shuffle_i32x4(m, n, 0xdd),
                                     _mm512_shuffle_i32x4(u, v, 0x88), _mm512_shuffle_i32x4(u, v, 0xdd)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
          _mm512_store_si512(sums + 64 * r + 16 * i, _mm512_add_epi32(in_order[i], offset[i]));
      }
      end_rows(j, {sums, some, 64, width, block, pixel + p, block});
      const int others = twice ? (int)std::min<int64_t>(some, count - part - p) : 0;
      if (others > 0) end_rows(j, {sums + 32, others, 64, width, block, pixel + part + p, block});
    }
  }
};

template <bool SIGNED>
void channels(const Job& j, int64_t begin, int64_t end, Room& room) {
  Row<SIGNED> row(j, room);
  const int64_t across = j.s.out_width, plane = j.s.out_height * across;
  while (begin < end) {
    const int64_t until = std::min(end, (begin / across + 1) * across), image = begin / plane;
    const uint8_t* from = j.x + image * j.s.height * j.s.width * j.c.channels;
    row(from, begin % plane / across, begin % across, until - begin, begin);
    begin = until;
  }
}

#endif

// The words of two taps are interleaved, so that one dot product adds two taps of 16 channels.
// weight: [block of 32 channels][two taps][2][16 channels, in the order the interleaving leaves][2]
void channels_of_words(const Job& j, int64_t begin, int64_t end) {
  const Conv& c = j.c;
  const int taps = c.taps, twos = (taps + 1) / 2;
  std::vector<const uint8_t*> at(2 * twos, c.zeros);
  alignas(64) int32_t sums[32 * PIXELS];
  const std::vector<Place> places = places_of(j, begin, end);
  for (int block = 0; block < c.out_channels; block += 32) {
    const int width = std::min(32, c.out_channels - block);
    const int8_t* weight = c.weight + (int64_t)block / 32 * twos * 128;
    const Ints low = load_ints(c.offset + block), high = load_ints(c.offset + block + LANES);
    for (int64_t first = begin; first < end; first += PIXELS) {
      const int some = (int)std::min<int64_t>(PIXELS, end - first);
      for (int r = 0; r < some; ++r) {
        const Place& place = places[first - begin + r];
        for (int k = 0; k < taps; ++k)
          at[k] = place.inside ? place.first + j.steps[k] : tap(j, place, k / c.kernel_w, k % c.kernel_w);
        Ints acc[2] = {all_ints(0), all_ints(0)};
        const int8_t* w = weight;
        for (int k = 0; k < 2 * twos; k += 2, w += 128) {
          Ints a, b;
          interleave(load_words(at[k] + 2 * block, width), load_words(at[k + 1] + 2 * block, width), a, b);
          acc[0] = dot_words(acc[0], a, load_packed(w));
          acc[1] = dot_words(acc[1], b, load_packed(w + 64));
        }
        put_in_order(acc[0], acc[1]);
        store_16(sums + 32 * r, add(acc[0], low), All{});
        store_16(sums + 32 * r + LANES, add(acc[1], high), All{});
      }
      end_rows(j, {sums, some, 32, width, block, first, block});
    }
  }
}

}  // namespace

void by_channel(const Job& j, int64_t begin, int64_t end, Room& room) {
  if (j.c.widens) return channels_of_words(widened(j, begin, end, room), begin, end);
#ifdef HAGO_AVX512_VNNI
  if (j.c.values == U8) return channels<false>(j, begin, end, room);
  if (j.c.values == I8) return channels<true>(j, begin, end, room);
#endif
  channels_of_words(j, begin, end);
}
