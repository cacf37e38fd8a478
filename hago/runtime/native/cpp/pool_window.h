// Windows of a pooling, on pixels whose channels lie innermost.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>

struct Window {
  int64_t images, height, width, out_height, out_width, channels;
  int32_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

// An output pixel and its window. `next` goes on to the pixel that follows, without a division.
struct Windowed {
  const Window& w;
  int64_t image, y, x;

  Windowed(const Window& w, int64_t pixel)
      : w(w), image(pixel / w.out_width / w.out_height), y(pixel / w.out_width % w.out_height), x(pixel % w.out_width) {}

  void next() {
    if (++x < w.out_width) return;
    x = 0;
    if (++y < w.out_height) return;
    y = 0;
    ++image;
  }

  // Calls `each(offset of the first channel)` for the pixels of the window that lie inside the image.
  template <typename Each>
  void inside(Each each) const {
    const int64_t x0 = x * w.stride_w - w.pad_w, y0 = y * w.stride_h - w.pad_h;
    for (int ky = 0; ky < w.kernel_h; ++ky) {
      const int64_t at_y = y0 + (int64_t)ky * w.dilation_h;
      if (at_y < 0 || at_y >= w.height) continue;
      for (int kx = 0; kx < w.kernel_w; ++kx) {
        const int64_t at_x = x0 + (int64_t)kx * w.dilation_w;
        if (at_x >= 0 && at_x < w.width) each(((image * w.height + at_y) * w.width + at_x) * w.channels);
      }
    }
  }
};

// Calls `each(window, pixel)` for all output pixels, a run of them on each thread.
template <typename Each>
void each_window(const Window& w, int threads, Each each) {
  const int64_t pixels = w.images * w.out_height * w.out_width;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t end = pixels * (thread + 1) / threads;
    int64_t pixel = pixels * thread / threads;
    if (pixel == end) continue;
    for (Windowed window(w, pixel); pixel < end; ++pixel, window.next()) each(window, pixel);
  }
}

template <typename T>
using Vector __attribute__((vector_size(64))) = T;

// V vectors of channels over a window, in registers.
template <int V, typename T>
inline void most_of(const Windowed& pixel, const T* x, T* to) {
  Vector<T> most[V];
  for (int v = 0; v < V; ++v) most[v] = std::numeric_limits<T>::min() + Vector<T>{};
  pixel.inside([&](int64_t at) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Vector<T> here;
      std::memcpy(&here, x + at + v * (64 / sizeof(T)), 64);
      most[v] = here > most[v] ? here : most[v];
    }
  });
  std::memcpy(to, most, sizeof(most));
}

// The largest values of n channels over a window; `x` is where the first of them lies in the first image.
template <typename T>
void max_row(const Windowed& pixel, const T* x, int64_t n, T* to) {
  constexpr int64_t EACH = 64 / sizeof(T);
  int64_t c = 0;
  for (; c + 4 * EACH <= n; c += 4 * EACH) most_of<4>(pixel, x + c, to + c);
  for (; c + EACH <= n; c += EACH) most_of<1>(pixel, x + c, to + c);
  if (c == n) return;
  for (int64_t i = c; i < n; ++i) to[i] = std::numeric_limits<T>::min();
  pixel.inside([&](int64_t at) {
    for (int64_t i = c; i < n; ++i) to[i] = to[i] < x[at + i] ? x[at + i] : to[i];
  });
}
