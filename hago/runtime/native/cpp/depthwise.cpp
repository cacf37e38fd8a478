// Convolutions of every channel by itself (depthwise), 64 channels of bytes at a time, or 32 of words.
#include "conv.h"

namespace {

constexpr int PIXELS = 16;  // whose sums are ended together

#ifdef HAGO_AVX512_VNNI
constexpr int64_t COLUMN = 256;  // bytes of four rows of 64 channels

// Four rows of a column of an image, 64 channels of them, interleaved: one dot product adds four taps of 16 channels.
struct Column {
  __m512i part[4];

  ALWAYS void add_to(Ints (&acc)[4], const Column& weights) const {
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
// weight: [block of 64 channels][column of a window][four rows][4][16 channels, as `turn_quarters` has them][4]
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
    each_pixel(count, pixel, [&](int64_t, Ints(&acc)[4]) __attribute__((always_inline)) {
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
    each_pixel(count, pixel, [&](int64_t p, Ints(&acc)[4]) __attribute__((always_inline)) {
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
    Ints offset[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) offset[i] = _mm512_loadu_si512(c.offset + block + 16 * (twice ? i % 2 : i));
    turn_quarters(offset);
    if (width == 64 && j.end_form == QUICK && is_straight(j.t.output[0]))
      return each_of_64(count, pixel, offset, sum);
    alignas(64) int32_t sums[64 * PIXELS];
    for (int64_t p = 0; p < part; p += PIXELS) {
      const int some = (int)std::min<int64_t>(PIXELS, part - p);
      for (int r = 0; r < some; ++r) {
        Ints acc[4] = {offset[0], offset[1], offset[2], offset[3]};
        sum(p + r, acc);
        turn_quarters(acc);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm512_store_si512(sums + 64 * r + 16 * i, acc[i]);
      }
      end_rows(j, {sums, some, 64, width, block, pixel + p, block});
      const int others = twice ? (int)std::min<int64_t>(some, count - part - p) : 0;
      if (others > 0) end_rows(j, {sums + 32, others, 64, width, block, pixel + part + p, block});
    }
  }

  // The same of 64 channels to bytes, straight from registers.
  template <typename Sum>
  ALWAYS void each_of_64(int64_t count, int64_t pixel, const Ints (&offset)[4], Sum sum) const {
    const Output& o = j.t.output[0];
    const ByteRange range(o.type == I8, o.zero, (int)o.move.low, (int)o.move.high);
    Ints ratio[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) ratio[i] = _mm512_castps_si512(load_floats(o.move.ratio + block + 16 * i));
    turn_quarters(ratio);
    uint8_t* to = reinterpret_cast<uint8_t*>(o.data) + pixel * o.stride + block;
    for (int64_t p = 0; p < count; ++p, to += o.stride) {
      Ints acc[4] = {offset[0], offset[1], offset[2], offset[3]};
      sum(p, acc);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[i] = to_ints(multiply(to_floats(acc[i]), _mm512_castsi512_ps(ratio[i])));
      store_bytes<4, true>(to, acc, 64, range);
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

// The part of the images that a block of output pixels reads, as centered words, with its padding around it.
struct Slab {
  const int64_t top, left, columns, pixel;  // its first row, counted over all padded images; its first column
  const int64_t tall;                       // rows of a padded image
  int16_t* words;

  Slab(const Job& j, int64_t begin, int64_t last, Room& room) : Slab(j, spot(j, begin), spot(j, last), room) {}

  // The first words of the windows of the output pixels [begin, end).
  std::vector<const int16_t*> windows(const Job& j, int64_t begin, int64_t end) const {
    std::vector<const int16_t*> found(end - begin);
    for (int64_t at = begin; at < end;) {
      const Spot p = spot(j, at);
      const int16_t* window = words + ((p.image * tall + p.y - top) * columns + p.x - left) * pixel;
      const int64_t until = std::min(end, at - at % j.s.out_width + j.s.out_width);
      for (; at < until; ++at, window += j.c.stride_w * pixel) found[at - begin] = window;
    }
    return found;
  }

 private:
  struct Spot {
    int64_t image, y, x;  // of the window's first tap, in a padded image
  };

  static Spot spot(const Job& j, int64_t at) {
    const int64_t plane = j.s.out_height * j.s.out_width;
    return {at / plane, at % plane / j.s.out_width * j.c.stride_h, at % j.s.out_width * j.c.stride_w};
  }

  Slab(const Job& j, const Spot& first, const Spot& last, Room& room)
      : top(first.image * tall_of(j) + first.y), left(one_row(first, last) ? first.x : 0),
        columns(one_row(first, last) ? last.x - first.x + (j.c.kernel_w - 1) * j.c.dilation_w + 1
                                     : j.s.width + 2 * j.c.pad_w),
        pixel(j.c.out_channels), tall(tall_of(j)) {
    const int64_t rows = last.image * tall + last.y + (j.c.kernel_h - 1) * j.c.dilation_h + 1 - top;
    words = reinterpret_cast<int16_t*>(room.of(rows * columns * pixel * sizeof(int16_t) + 64));
    for (int64_t r = 0; r < rows; ++r) fill(j, (top + r) / tall, (top + r) % tall - j.c.pad_h, words + r * columns * pixel);
  }

  static int64_t tall_of(const Job& j) { return j.s.height + 2 * j.c.pad_h; }
  static bool one_row(const Spot& first, const Spot& last) { return first.image == last.image && first.y == last.y; }

  void fill(const Job& j, int64_t image, int64_t y, int16_t* to) const {
    const int64_t from = left - j.c.pad_w, until = from + columns;  // columns of the image
    const bool outside = y < 0 || y >= j.s.height;
    const int64_t begin = std::clamp<int64_t>(0, from, until);
    const int64_t end = outside ? begin : std::clamp(j.s.width, begin, until);
    std::fill(to, to + (begin - from) * pixel, 0);
    to_words(j.c, j.x + ((image * j.s.height + y) * j.s.width + begin) * stored_pixel(j.c), (end - begin) * pixel,
             to + (begin - from) * pixel);
    std::fill(to + (end - from) * pixel, to + columns * pixel, 0);
  }
};

// Channels of words: those of two taps are interleaved, so that one dot product adds two taps of every channel.
// weight: [block of 32 channels][two taps][2][16 channels, in the order the interleaving leaves][2]
class Words {
 public:
  Words(const Job& j, int64_t begin, int64_t end, Room& room)
      : j(j), begin(begin), end(end), taps(j.c.taps), twos((taps + 1) / 2), slab(j, begin, end - 1, room),
        windows(slab.windows(j, begin, end)) {
    for (int k = 0; k < taps; ++k)
      steps.push_back((k / j.c.kernel_w * j.c.dilation_h * slab.columns + k % j.c.kernel_w * j.c.dilation_w) * slab.pixel);
  }

  void operator()() {
    const int channels = j.c.out_channels;
#ifdef HAGO_STORES_INTERLEAVED
    if (j.end_form == QUICK && channels % WORDS == 0 && is_straight(j.t.output[0])) {
      for (int channel = 0; channel < channels; channel += WORDS) to_bytes_of(channel);
      return;
    }
#endif
    for (int block = 0; block < channels; block += BLOCK) {
      const int width = std::min(BLOCK, channels - block);
      for (int64_t first = begin; first < end; first += PIXELS) {
        const int some = (int)std::min<int64_t>(PIXELS, end - first);
        for (int channel = block; channel < block + width; channel += WORDS) {
          const int32_t* offset = j.c.offset + channel;
          const Vec start[2] = {load_vec(offset), load_vec(offset + WORDS / 2)}, none[2] = {};
          int32_t* to = sums + channel - block;
          by_vec(&windows[first - begin], some, channel, none, [&](Vec low, Vec high) __attribute__((always_inline)) {
            put_in_order(low, high);
            store_vec(to, add_vec(low, start[0]));
            store_vec(to + WORDS / 2, add_vec(high, start[1]));
            to += BLOCK;
          });
        }
        end_rows(j, {sums, some, BLOCK, width, block, first, block});
      }
    }
  }

 private:
  static constexpr int BLOCK = 32, STEP = 4 * BLOCK;  // bytes of the weights of two taps
  const Job& j;
  const int64_t begin, end;
  const int taps, twos;
  const Slab slab;
  std::vector<int64_t> steps;                 // from the first word of a window to that of each tap
  const std::vector<const int16_t*> windows;  // of the pixels
  alignas(64) int32_t sums[BLOCK * PIXELS];

#ifdef HAGO_STORES_INTERLEAVED
  // All pixels of WORDS channels to bytes, straight from registers.
  void to_bytes_of(int channel) const {
    const Output& o = j.t.output[0];
    const ByteRange range(o.type == I8, o.zero, (int)o.move.low, (int)o.move.high);
    const float* ratio = o.move.ratio + channel;
    Vec by[2] = {load_vec(ratio), load_vec(ratio + WORDS / 2)};
    Vec start[2] = {load_vec(j.c.offset + channel), load_vec(j.c.offset + channel + WORDS / 2)};
    put_out_of_order(by[0], by[1]);
    put_out_of_order(start[0], start[1]);
    uint8_t* to = reinterpret_cast<uint8_t*>(o.data) + begin * o.stride + channel;
    by_vec(windows.data(), end - begin, channel, start, [&](Vec low, Vec high) __attribute__((always_inline)) {
      store_interleaved(to, low, high, by, range);
      to += o.stride;
    });
  }
#endif

  // Has `end_of` take the sums of `count` pixels, of one Vec of channels, in the order of `start` and the interleaving.
  // Weights of 9 taps stay in registers. Channels past the last one have weights of 0.
  template <typename End>
  ALWAYS void by_vec(const int16_t* const* window, int64_t count, int channel, const Vec (&start)[2],
                     End end_of) const {
    if (taps == 9) by_taps<9>(window, count, channel, start, end_of);
    else by_taps<0>(window, count, channel, start, end_of);
  }

  template <int TAPS, typename End>
  ALWAYS void by_taps(const int16_t* const* window, int64_t count, int channel, const Vec (&start)[2],
                      End end_of) const {
    constexpr int TWOS = (TAPS + 1) / 2;
    const int number = twos;
    const int8_t* w = j.c.weight + (int64_t)channel / BLOCK * twos * STEP + channel % BLOCK / WORDS * sizeof(Vec);
    const int64_t* step = steps.data();
    Vec held[TWOS ? TWOS : 1][2];
#pragma GCC unroll 8
    for (int k = 0; k < TWOS; ++k) {
      held[k][0] = load_vec(w + STEP * k);
      held[k][1] = load_vec(w + STEP * k + STEP / 2);
    }
    for (int64_t r = 0; r < count; ++r) {
      const int16_t* x = window[r] + channel;
      Vec low = start[0], high = start[1];
#pragma GCC unroll 8
      for (int k = 0; k < (TAPS ? TWOS : number); ++k) {
        Vec a, b;
        interleave(load_vec(x + step[2 * k]), 2 * k + 1 < (TAPS ? TAPS : taps) ? load_vec(x + step[2 * k + 1]) : Vec{}, a, b);
        low = dot_vec(low, a, TAPS ? held[k][0] : load_vec(w + STEP * k));
        high = dot_vec(high, b, TAPS ? held[k][1] : load_vec(w + STEP * k + STEP / 2));
      }
      end_of(low, high);
    }
  }
};

}  // namespace

void by_channel(const Job& j, int64_t begin, int64_t end, Room& room) {
#ifdef HAGO_AVX512_VNNI
  if (j.c.values == U8) return channels<false>(j, begin, end, room);
  if (j.c.values == I8) return channels<true>(j, begin, end, room);
#endif
  Words(j, begin, end, room)();
}
