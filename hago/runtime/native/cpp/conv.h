// A convolution as its kernels see it: what there is to do, and the windows of output pixels.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "vectors.h"

struct Conv {
  int32_t channels;      // bytes of a pixel as products read it: two for each channel where they are of words
  int32_t out_channels, groups;
  int32_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int32_t values;        // what x holds: U8, I8 or I16, which has no zero point
  int32_t widens;        // whether bytes are read as words, from which `zero` is subtracted
  int32_t zero;
  int32_t fits;          // how many sums of pairs of products 16 bits hold, of 1, 2 and 4; 0: products are exact, or words
  int32_t panel;         // output channels worked on at once, a multiple of 16; 0: every channel by itself
  int32_t panels;        // of a group
  int32_t depth;         // bytes of a tap; a multiple of 4
  int32_t taps;          // AT_PIXELS: kernel_h * kernel_w; IN_ROWS: kernel_h, each a row of pixels; IN_PATCH: 1
  int32_t gather;
  int32_t steps;         // of a window that is read in matrix tiles: of 64 bytes, or of woven rows; 0 for no tiles
  int32_t woven;         // rows of a window that tiles read at once, `depth` bytes of them; 0 where they do not
  int32_t winograd;      // the side of a square of winograd.cpp, whose points are the taps of `weight`; 0 for none
  const int8_t* weight;  // [group][panel][tap][depth / 4][panel channels][4 bytes]; see weights.py for the others
  const int32_t* offset; // [group][panels * panel]: bias - zero point * sum of the weights
  const uint8_t* zeros;  // `channels` (and 64 more) bytes of zero points, as products read them
  // Of weights that are split into fours whose pairs fit 16 bits, which `weight` then holds as [four][8 channels][4
  // bytes], those of a vector of 8 channels one after the other: every two of them to multiply together, then the rest.
  // Null for other weights.
  const int32_t* four_starts;  // [vector][2]: its first four, and its first of the rest; at the end, how many there are
  const int32_t* places;       // of each four: the byte of its tap that the first of it is multiplied by
  const int32_t* four_taps;    // of each four: its tap
};

// How the bytes of a window are read: tap by tap; a row of the window at once, where pixels have few channels;
// or copied together, where nothing lies side by side.
enum Gather : int32_t { AT_PIXELS = 0, IN_ROWS = 1, IN_PATCH = 2 };

struct Shape {
  int64_t images, height, width, out_height, out_width;
};

struct Job {
  const Conv& c;
  const Shape& s;
  const Tail& t;
  const uint8_t* x;
  const uint8_t* end;
  const EndForm end_form;
  const bool plain;
  std::vector<int64_t> steps;  // from the first byte of a window that lies inside to that of each tap

  Job(const Conv& c, const Shape& s, const Tail& t, const uint8_t* x)
      : c(c), s(s), t(t), x(x), end_form(end_form_of(t)), plain(is_plain(t)) {
    end = x + s.images * s.height * s.width * c.channels;
    const int across = c.gather == AT_PIXELS ? c.kernel_w : 1;
    for (int k = 0; k < c.taps; ++k)
      steps.push_back((k / across * c.dilation_h * s.width + k % across * c.dilation_w) * c.channels);
  }
};

// Whether windows are single pixels one after the other.
inline bool is_pointwise(const Job& j) {
  const Conv& c = j.c;
  return c.gather == AT_PIXELS && c.taps == 1 && j.s.out_height == 1 && j.s.height == 1 && !c.pad_w && c.stride_w == 1;
}

// Whether signed bytes are copied as unsigned ones before products read them.
inline bool turns(const Conv& c) { return c.four_starts && c.values == I8; }

// Bytes of a pixel as it is stored.
inline int64_t stored_pixel(const Conv& c) { return c.widens ? c.channels / 2 : c.channels; }

// Images with their padding around them, where rows of windows are read at once: no window lies across an edge. Rows
// that are woven are unsigned, and 64 bytes may be read past their end.
struct Padded {
  Conv conv;
  Shape shape;
  const uint8_t* x;
  std::vector<uint8_t> room;

  Padded(const Conv& c, const Shape& s, const uint8_t* from, int threads) : conv(c), shape(s), x(from) {
    if (c.gather != IN_ROWS || !(c.pad_h || c.pad_w || c.woven)) return;
    const bool flips = (c.woven || c.four_starts) && c.values == I8;
    const uint8_t flip = flips ? 0x80 : 0, around = c.four_starts ? 0 : flip;  // of fours, the zeros are turned
    if (flips) conv.values = U8;
    conv.pad_h = conv.pad_w = 0;
    shape.height += 2 * c.pad_h;
    shape.width += 2 * c.pad_w;
    const int64_t pixel = stored_pixel(c), row = s.width * pixel, wide = shape.width * pixel, edge = c.pad_w * pixel;
    room.assign(s.images * shape.height * wide + 64, (c.widens ? (uint8_t)c.zero : c.zeros[0]) ^ around);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t image = 0; image < s.images; ++image)
      for (int64_t y = 0; y < s.height; ++y) {
        uint8_t* to = &room[(image * shape.height + y + c.pad_h) * wide + edge];
        const uint8_t* at = from + (image * s.height + y) * row;
        for (int64_t i = 0; i < row; ++i) to[i] = at[i] ^ flip;
      }
    x = room.data();
  }
};

// The window of an output pixel.
struct Place {
  const uint8_t* image;
  const uint8_t* first;  // its first byte, where it lies inside
  int32_t x, y;
  bool inside;
};

// The windows of the output pixels [begin, end), and room for `more`. They are filled in where they are: a copy of one
// just written waits for the write.
inline std::vector<Place> places_of(const Job& j, int64_t begin, int64_t end, int more = 0) {
  const Conv& c = j.c;
  std::vector<Place> places(end - begin + more);
  const int64_t plane = j.s.out_height * j.s.out_width, size = j.s.height * j.s.width * c.channels;
  const int64_t rightmost = j.s.width - 1 - (c.kernel_w - 1) * c.dilation_w;
  // a row is read in fours, which may pass its end by three bytes
  const uint8_t* last = c.gather == IN_ROWS ? j.end - c.depth - j.steps.back() : j.end;
  for (int64_t at = begin; at < end;) {
    const int64_t out_x = at % j.s.out_width, until = std::min(end, at - out_x + j.s.out_width);
    const int64_t y = at % plane / j.s.out_width * c.stride_h - c.pad_h;
    int64_t x = out_x * c.stride_w - c.pad_w;
    const uint8_t *image = j.x + at / plane * size, *first = image + (y * j.s.width + x) * c.channels;
    const bool inside = c.gather != IN_PATCH && y >= 0 && y + (c.kernel_h - 1) * c.dilation_h < j.s.height;
    for (; at < until; ++at, x += c.stride_w, first += c.stride_w * c.channels) {
      Place& p = places[at - begin];
      p.image = image;
      p.first = first;
      p.x = (int32_t)x;
      p.y = (int32_t)y;
      p.inside = inside && x >= 0 && x <= rightmost && first <= last;
    }
  }
  return places;
}

inline const uint8_t* tap(const Job& j, const Place& p, int ky, int kx) {
  const int64_t y = p.y + ky * j.c.dilation_h, x = p.x + kx * j.c.dilation_w;
  const bool inside = (uint64_t)y < (uint64_t)j.s.height && (uint64_t)x < (uint64_t)j.s.width;
  return inside ? p.image + (y * j.s.width + x) * j.c.channels : j.c.zeros;
}

// The window with its channels from `from` on, tap by tap as weights are laid.
inline void copy_window(const Job& j, const Place& p, int from, uint8_t* to) {
  const Conv& c = j.c;
  const int each = c.channels / c.groups;
  const int across = c.gather == AT_PIXELS ? c.depth : each, down = c.gather == IN_ROWS ? c.depth : c.kernel_w * across;
  for (int ky = 0; ky < c.kernel_h; ++ky)
    for (int kx = 0; kx < c.kernel_w; ++kx) std::memcpy(to + ky * down + kx * across, tap(j, p, ky, kx) + from, each);
}

inline void finish_any(const Tail& t, bool plain, const Tile& tile) {
  if (plain) return finish_tile(tile, t);
  for (int r = 0; r < tile.rows; ++r)
    finish(tile.sums + r * tile.pitch, tile.width, tile.channel, tile.at(r), t, tile.column);
}

// Has what a tile will read and write brought near while its sums are made. Compilers take functions that do
// nothing but prefetch for functions without effects, and leave out their calls, unless they are inlined.
template <int WRITES>
ALWAYS void bring_rows(const Tile& tile, const char* data, int type, int64_t stride) {
  for (int r = 0; r < tile.rows; ++r) {
    const char* from = data + (tile.at(r) * stride + tile.column) * BYTES[type];
    for (int at = 0; at < tile.width * BYTES[type]; at += 64) __builtin_prefetch(from + at, WRITES);
  }
}

ALWAYS void bring_near(const Tail& t, const Tile& tile) {
  if (t.adds) bring_rows<0>(tile, t.addend.data, t.addend.type, t.addend.stride);
  for (int k = 0; k < t.outputs; ++k) bring_rows<1>(tile, t.output[k].data, t.output[k].type, t.output[k].stride);
}

// What follows the sums of a panel.
inline void end_rows(const Job& j, const Tile& tile) {
  const Output& o = j.t.output[0];
  if (j.end_form == ANY) return finish_any(j.t, j.plain, tile);
  if (j.end_form == RAW) return raw_tile(tile, o);
  end_quick(o, tile);
}

// Bytes to work in, from the start of a line of the cache on; what they hold is lost where they grow.
class Room {
 public:
  uint8_t* of(int64_t size) {
    if (size > held) {
      bytes.reset(new uint8_t[size + 63]);
      held = size;
    }
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.get()) + 63) / 64 * 64);
  }

 private:
  std::unique_ptr<uint8_t[]> bytes;
  int64_t held = 0;
};

// n stored values as centered words.
inline void to_words(const Conv& c, const uint8_t* from, int64_t n, int16_t* to) {
  if (c.values == I16) std::memcpy(to, from, n * sizeof(int16_t));
  else if (c.values == I8) widen(reinterpret_cast<const int8_t*>(from), n, c.zero, to);
  else widen(from, n, c.zero, to);
}

// The job of the output pixels [begin, end) with the bytes that they read as centered words, or turned, in `room`.
// Their padding is left out, so that taps of it can be skipped; depthwise.cpp, where it is little, lays it around them.
inline Job copied(const Job& j, int64_t begin, int64_t end, Room& room) {
  const Conv& c = j.c;
  const Shape& s = j.s;
  const int64_t plane = s.out_height * s.out_width, last = end - 1, row = s.width;
  const auto row_of = [&](int64_t pixel, int64_t tap) {
    const int64_t y = pixel % plane / s.out_width * c.stride_h - c.pad_h + tap * c.dilation_h;
    return pixel / plane * s.height + std::min(std::max<int64_t>(y, 0), s.height - 1);
  };
  const auto column_of = [&](int64_t pixel, int64_t tap) {
    const int64_t x = pixel % s.out_width * c.stride_w - c.pad_w + tap * c.dilation_w;
    return std::min(std::max<int64_t>(x, 0), row - 1);
  };
  const int64_t top = row_of(begin, 0), bottom = row_of(last, c.kernel_h - 1);
  const bool one_row = top == bottom && begin / s.out_width == last / s.out_width;
  const int64_t from = top * row + (one_row ? column_of(begin, 0) : 0);
  const int64_t to = bottom * row + (one_row ? column_of(last, c.kernel_w - 1) + 1 : row);
  const int64_t channels = stored_pixel(c), values = (to - from) * channels, size = (to - from) * c.channels;
  uint8_t* copy = room.of(size + 64);
  const uint8_t* stored = j.x + from * channels;
  if (c.widens) to_words(c, stored, values, reinterpret_cast<int16_t*>(copy));
  else
    for (int64_t i = 0; i < values; ++i) copy[i] = stored[i] ^ 0x80;
  Job near = j;
  near.x = copy - from * c.channels;  // so that pixels lie where the job expects them
  near.end = copy + size;
  return near;
}

// The output pixels [begin, end): every channel by itself, or panel by panel.
void by_channel(const Job& job, int64_t begin, int64_t end, Room& room);
void by_panels(const Job& job, int first, int count, int64_t begin, int64_t end, Room& room);
void by_tiles(const Job& job, int first, int count, int64_t begin, int64_t end, Room& room);
#ifdef HAGO_PAIRS
void by_fours(const Job& job, int first, int count, int64_t begin, int64_t end);
#endif
void by_winograd(const Job& job, int first, int count, int64_t begin, int64_t end, Room& room);

// Output pixels whose windows stay in the cache while all panels pass over them; copies of them, for matrix tiles.
inline int64_t block_of(const Conv& c, const Shape& s) {
  constexpr int64_t PIXELS = 168, ROOM = 512 << 10, SIDE = 32;
  if (!c.panel && (c.widens || c.values == I16)) {  // rows of images, of which neighbouring blocks read some again
    const int64_t rows = (ROOM / 2 / (s.width * c.channels) - (c.kernel_h - 1) * c.dilation_h) / c.stride_h;
    return std::max(PIXELS, rows * s.out_width);
  }
  if (const int n = c.winograd) {  // rows of squares, or whole images
    const int64_t rows = (s.out_height + n - 1) / n, row = (s.out_width + n - 1) / n * c.channels / c.groups * c.taps;
    const int64_t some = std::max<int64_t>(1, ROOM / 2 / row);
    return some < rows ? n * some * s.out_width : some / rows * s.out_height * s.out_width;
  }
  return c.steps ? std::max<int64_t>(2, ROOM / (c.steps * 64 * SIDE)) * SIDE : PIXELS;
}
