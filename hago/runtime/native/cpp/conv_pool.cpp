// A convolution that only a max pooling reads: its rows stay in the cache and are pooled as soon as they are there.
#include <numeric>

#include "conv.h"
#include "pool_window.h"

namespace {

constexpr int64_t ROOM = 256 << 10;  // bytes of rows that a thread holds, where so few do

// Rows [top, bottom) of what is pooled of one image, some at a time.
struct Run {
  const Conv& conv;
  const Shape& shape;
  const Tail &tail, &after;
  const Window& w;
  const uint8_t* x;
  const int64_t image;

  // Rows [from, to) of maxima, some pixels at a time.
  template <typename T>
  void pool(const T* rows, int64_t from, int64_t to) const {
    const bool plain = is_plain(after);
    alignas(64) int32_t sums[4 * ROW];
    for (int64_t channel = 0; channel < w.channels; channel += ROW) {
      const int n = (int)std::min<int64_t>(ROW, w.channels - channel);
      const int64_t end = to * w.out_width, side = 4 * ROW / n;
      Windowed pixel(w, from * w.out_width);
      for (int64_t first = from * w.out_width; first < end; first += side) {
        const int count = (int)std::min(side, end - first);
        const Tile tile{sums, count, n, n, (int)channel, first, channel};
        bring_near(after, tile);
        for (int r = 0; r < count; ++r, pixel.next()) most(rows + channel, pixel, n, sums + r * n);
        finish_any(after, plain, tile);
      }
    }
  }

  // The largest values of a window, centered.
  template <typename T>
  void most(const T* x, const Windowed& pixel, int n, int32_t* to) const {
    const int32_t zero = tail.output[0].zero;
    if constexpr (sizeof(T) == sizeof(int32_t)) {
      max_row(pixel, x, n, to);
      for (int i = 0; zero && i < n; ++i) to[i] -= zero;
    } else {
      T found[ROW];
      max_row(pixel, x, n, found);
      for (int i = 0; i < n; ++i) to[i] = (int32_t)found[i] - zero;
    }
  }

  void operator()(int64_t top, int64_t bottom) const {
    const int type = tail.output[0].type;
    const int64_t row = w.width * w.channels * BYTES[type], reach = (w.kernel_h - 1) * w.dilation_h + 1;
    const int64_t block = block_of(conv, shape);
    int64_t step = std::max<int64_t>(1, (ROOM / row - reach) / w.stride_h + 1);
    if (conv.winograd) {  // whole squares: as many rows as a multiple of both
      const int64_t unit = conv.winograd / std::gcd<int64_t>(conv.winograd, w.stride_h);
      step = std::max(unit, step - step % unit);
    }
    Room space;
    std::vector<char> room(((step - 1) * w.stride_h + reach) * row);
    int64_t held = 0, made = 0;  // rows [held, made) are in the room
    for (int64_t at = top; at < bottom; at += step) {
      const int64_t next = std::min(bottom, at + step), first = std::max<int64_t>(0, at * w.stride_h - w.pad_h);
      const int64_t last = std::min(w.height, (next - 1) * w.stride_h - w.pad_h + reach);
      if (made > first) std::memmove(room.data(), room.data() + (first - held) * row, (made - first) * row);
      Tail inner = tail;  // the room takes the place of the rows in the whole value
      inner.output[0].data = room.data() - (image * w.height + first) * row;
      inner.output[0].stride = w.channels;
      const Job j(conv, shape, inner, x);
      const int64_t end = (image * w.height + last) * w.width;
      for (int64_t p = (image * w.height + std::max(first, made)) * w.width; p < end; p += block) {
        if (conv.panel) by_panels(j, 0, conv.groups * conv.panels, p, std::min(end, p + block), space);
        else by_channel(j, p, std::min(end, p + block), space);
      }
      held = first;
      made = last;
      const char* rows = inner.output[0].data;
      const int64_t from = image * w.out_height + at, to = image * w.out_height + next;
      if (type == U8) pool((const uint8_t*)rows, from, to);
      else if (type == I8) pool((const int8_t*)rows, from, to);
      else if (type == I16) pool((const int16_t*)rows, from, to);
      else pool((const int32_t*)rows, from, to);
    }
  }
};

}  // namespace

extern "C" void hago_conv_max_pool(const Conv* conv, const Shape* shape, const Tail* tail, const Window* window,
                                   const Tail* after, const uint8_t* x, int threads) {
  const Window& w = *window;
  const Padded images(*conv, *shape, x, threads);
  const int64_t runs = std::min(w.out_height, (threads + w.images - 1) / w.images);  // of an image
  const int64_t rows = (w.out_height + runs - 1) / runs;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
  for (int64_t unit = 0; unit < w.images * runs; ++unit) {
    const int64_t top = unit % runs * rows;
    Run{images.conv, images.shape, *tail, *after, w, images.x, unit / runs}(top, std::min(w.out_height, top + rows));
  }
}
