// Convolutions of bytes by signed bytes, and of words by words, summed in int32 modulo 2**32, with all that follows
// done on the tile.
//
// The dot products of four unsigned by four signed bytes (VPDPBUSD) and of two by two signed words (VPDPWSSD, VPMADDWD)
// do not saturate, so a sum is exact modulo 2**32 in any order. VPMADDUBSW, whose sums of pairs do, is taken where the
// weights prove that they cannot (`pairs_that_fit` of weights.py) or are split so that they cannot (fours.cpp).
// Bytes of the type that products do not read have their highest bit turned, which the offset takes out again. Where no
// product of bytes is exact, they are widened to words.
#include "accumulate.h"
#include "conv.h"

namespace {

// `accumulate` by N fours of bytes at a time, of which the sums of pairs fit 16 bits; what is left over is added one by
// one.
template <int N, int R, Type X>
ALWAYS void accumulate_pairs(Ints (&acc)[R][1], const uint8_t* const* x, const int8_t* w, int depth) {
  const auto run = [&](auto count, int k, int end) __attribute__((always_inline)) {
    constexpr int C = decltype(count)::value;
    for (; k + 4 * C <= end; k += 4 * C) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        Ints a[C], b[C];
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) {
          a[i] = all_packed(x[r] + k + 4 * i);
          if (X == TURNED) a[i] = turn(a[i]);
          b[i] = load_packed(w + 16 * (k + 4 * i));
        }
        acc[r][0] = dot_pairs<C>(acc[r][0], a, b);
      }
    }
    return k;
  };
  const int whole = run(std::integral_constant<int, N>{}, 0, depth);
  if (N > 1) run(std::integral_constant<int, 1>{}, whole, depth);
}

template <int R, int Z, Type X, bool HALF>
ALWAYS void accumulate_any(Ints (&acc)[R][Z], const uint8_t* const* x, const int8_t* w, int depth, int fits) {
#ifdef HAGO_PAIRS
  if constexpr (HALF) return accumulate_half<R>(acc, x, w, depth);
#endif
  if constexpr (DOTS_BYTES == IF_PAIRS_FIT && X != I16) {
    if (fits == 1) accumulate_pairs<1, R, X>(acc, x, w, depth);
    else if (fits == 2) accumulate_pairs<2, R, X>(acc, x, w, depth);
    else accumulate_pairs<4, R, X>(acc, x, w, depth);
  } else {
    accumulate<R, Z, X>(acc, x, w, depth);
  }
}

// The pixels [begin, end) of a block and their windows, MOST_ROWS more than there are; no windows where they are single
// pixels one after the other. Where a zero point is stored as 0, taps that no window of a tile has need not be added:
// so pixels whose windows lie across the same edges of an image stand side by side, the edges going round.
struct Pixels {
  const int64_t begin, end;
  std::vector<Place> places;
  std::vector<int64_t> order;
  bool skips = false;

  Pixels(const Job& j, int64_t begin, int64_t end) : begin(begin), end(end) {
    const Conv& c = j.c;
    if (is_pointwise(j)) return;
    places = places_of(j, begin, end, MOST_ROWS);
    const int64_t count = end - begin;
    const bool many = 20 * (j.s.out_height + j.s.out_width) > j.s.out_height * j.s.out_width;  // edges
    const bool turned = c.values == TURNED && !c.widens;
    skips = many && c.gather == AT_PIXELS && !turned && c.zeros[0] == 0 && (c.pad_h || c.pad_w);
    if (skips) sort(j, count);
    std::fill(places.begin() + count, places.end(), places[count - 1]);
  }

  const int64_t* order_of(int64_t pixel) const { return skips ? &order[pixel - begin] : nullptr; }

 private:
  void sort(const Job& j, int64_t count) {
    // by whether a window passes the top (1), the bottom (2), the left (4), the right (8)
    static constexpr int RANK[16] = {0, 2, 6, 9, 8, 1, 7, 9, 4, 3, 5, 9, 9, 9, 9, 9};
    const auto rank = [&](const Place& p) {
      const Conv& c = j.c;
      const bool bottom = p.y + (c.kernel_h - 1) * c.dilation_h >= j.s.height;
      const bool right = p.x + (c.kernel_w - 1) * c.dilation_w >= j.s.width;
      return p.inside ? 0 : RANK[(p.y < 0) + 2 * bottom + 4 * (p.x < 0) + 8 * right];
    };
    std::vector<int> ranks(count);
    int64_t starts[11] = {};
    for (int64_t i = 0; i < count; ++i) ++starts[(ranks[i] = rank(places[i])) + 1];
    for (int r = 0; r < 10; ++r) starts[r + 1] += starts[r];
    std::vector<Place> sorted(places.size());
    order.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t to = starts[ranks[i]]++;
      sorted[to] = places[i];
      order[to] = begin + i;
    }
    places.swap(sorted);
  }
};

// One panel of output channels, R pixels by 16 * Z channels at a time. HALF: words, and a panel of at most 8 channels.
template <int R, int Z, Type X, bool HALF>
struct Panel {
  using Sums = Ints[R][Z];
  const Job& j;
  const Conv& c;
  const Pixels& pixels;
  const int from, width, column, room;
  const int8_t* weight;
  const int32_t* offset;
  std::vector<uint8_t> copies;

  Panel(const Job& j, const Pixels& pixels, int group, int panel)
      : j(j), c(j.c), pixels(pixels), from(group * (c.channels / c.groups)),
        width(std::min(c.panel, c.out_channels / c.groups - panel * c.panel)),
        column(group * (c.out_channels / c.groups) + panel * c.panel), room(c.taps * c.depth + 4),
        weight(c.weight + (int64_t)(group * c.panels + panel) * c.taps * c.depth * 16 * Z),
        offset(c.offset + (group * c.panels + panel) * c.panel),
        copies(c.gather == AT_PIXELS ? 0 : R * room) {}

  void operator()() {
    if (j.end_form == QUICK && width == 16 * Z && !pixels.skips && is_straight(j.t.output[0])) straight_tiles();
    else any_tiles(pixels.begin);
  }

 private:
  // In a function of its own, like the other loop over tiles: where both are in one, compilers keep some of the sums in
  // memory.
  __attribute__((noinline)) void straight_tiles() {
    const Output& o = j.t.output[0];
    const Quick<Z> quick(o, column, width);
    uint8_t* to = reinterpret_cast<uint8_t*>(o.data) + pixels.begin * o.stride + column;
    int64_t first = pixels.begin;
    for (; first + R <= pixels.end; first += R) {
      Sums acc;
      start(acc);
      add_window(acc, first, R);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r, to += o.stride) quick.straight(acc[r], to);
    }
    if (first < pixels.end) any_tiles(first);
  }

  __attribute__((noinline)) void any_tiles(int64_t first) {
    for (; first < pixels.end; first += R) {
      const int rows = (int)std::min<int64_t>(R, pixels.end - first);
      const Tile tile{nullptr, rows, 16 * Z, width, column, first, column, pixels.order_of(first)};
      if (j.end_form == ANY) bring_near(j.t, tile);
      Sums acc;
      start(acc);
      add_window(acc, first, rows);
      end_tile(acc, tile);
    }
  }

  ALWAYS void start(Sums& acc) const {
#pragma GCC unroll 4
    for (int z = 0; z < Z; ++z) {
      const Ints sums = load_ints(offset + 16 * z);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][z] = sums;
    }
  }

  // Adds the windows of `rows` pixels from `first` on; as many as R are computed.
  ALWAYS void add_window(Sums& acc, int64_t first, int rows) {
    const uint8_t* at[R];
    if (pixels.places.empty()) {
      for (int r = 0; r < R; ++r) at[r] = j.x + (first + (r < rows ? r : 0)) * c.channels + from;
      return add_tap(acc, at, 0);
    }
    const Place* place = &pixels.places[first - pixels.begin];
    bool all_inside = true;
    for (int r = 0; r < R; ++r) all_inside = all_inside && place[r].inside;
    if (!all_inside && c.gather != AT_PIXELS)
      for (int r = 0; r < R; ++r)
        if (!place[r].inside) copy_window(j, place[r], from, copies.data() + r * room);
    const int64_t* steps = j.steps.data();
    for (int k = 0, ky = 0, kx = 0; k < c.taps; ++k) {
      bool nothing = pixels.skips && !all_inside;
      if (all_inside)
        for (int r = 0; r < R; ++r) at[r] = place[r].first + steps[k] + from;
      else
        for (int r = 0; r < R; ++r) {
          at[r] = place[r].inside ? place[r].first + steps[k] + from : outside(place[r], r, k, ky, kx);
          nothing = nothing && at[r] == c.zeros + from;
        }
      if (++kx == c.kernel_w) kx = 0, ++ky;
      if (nothing) continue;
      add_tap(acc, at, k);
    }
  }

  ALWAYS void add_tap(Sums& acc, const uint8_t* const* at, int k) const {
    accumulate_any<R, Z, X, HALF>(acc, at, weight + (int64_t)k * c.depth * 16 * Z, c.depth, c.fits);
  }

  // Tap k of a window that lies across an edge; its row and its column in the kernel, where it is a pixel.
  const uint8_t* outside(const Place& place, int row, int k, int ky, int kx) const {
    if (c.gather != AT_PIXELS) return copies.data() + row * room + k * c.depth;
    return tap(j, place, ky, kx) + from;
  }

  ALWAYS void end_tile(const Sums& acc, Tile tile) const {
    if (j.end_form == RAW && width == 16 * Z && tile.rows == R) {
      const Output& o = j.t.output[0];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int z = 0; z < Z; ++z)
          store_16((int32_t*)o.data + tile.at(r) * o.stride + column + 16 * z, acc[r][z], All{});
      return;
    }
    alignas(64) int32_t sums[R * Z * 16];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) store_16(sums + 16 * (r * Z + z), acc[r][z], All{});
    tile.sums = sums;
    end_rows(j, tile);
  }
};

template <int R, int Z, Type X, bool HALF = false>
void tiles(const Job& j, const Pixels& pixels, int group, int panel) {
  Panel<R, Z, X, HALF>(j, pixels, group, panel)();
}

template <Type X>
void panel_of(const Job& j, const Pixels& pixels, int group, int panel) {
  const bool few = pixels.end - pixels.begin <= 2;  // a row or two of a matrix: no tile of pixels
#ifdef HAGO_AVX512
  switch (j.c.panel / 16 + (few ? 4 : 0)) {
    case 1: return tiles<ROWS_OF[1], 1, X>(j, pixels, group, panel);
    case 2: return tiles<ROWS_OF[2], 2, X>(j, pixels, group, panel);
    case 3: return tiles<ROWS_OF[3], 3, X>(j, pixels, group, panel);
    case 4: return tiles<ROWS_OF[4], 4, X>(j, pixels, group, panel);
    case 5: return tiles<1, 1, X>(j, pixels, group, panel);
    case 6: return tiles<1, 2, X>(j, pixels, group, panel);
    case 7: return tiles<1, 3, X>(j, pixels, group, panel);
    default: return tiles<1, 4, X>(j, pixels, group, panel);
  }
#else
#ifdef HAGO_PAIRS
  if constexpr (X == I16) {
    const bool half = j.c.out_channels / j.c.groups - panel * j.c.panel <= LANES / 2;
    if (half && !few) return tiles<TALLEST, 1, X, true>(j, pixels, group, panel);
  }
#endif
  if (few) return tiles<1, 1, X>(j, pixels, group, panel);
  tiles<TALLEST, 1, X>(j, pixels, group, panel);
#endif
}

void some_panels(const Job& j, int first, int count, int64_t begin, int64_t end) {
  const Pixels pixels(j, begin, end);
  auto each = panel_of<I16>;
  if constexpr (DOTS_BYTES != NEVER)
    if (!j.c.widens && j.c.values != I16) each = j.c.values == U8 ? panel_of<U8> : panel_of<I8>;
  for (int p = first; p < first + count; ++p) each(j, pixels, p / j.c.panels, p % j.c.panels);
}

}  // namespace

void by_panels(const Job& job, int first, int count, int64_t begin, int64_t end, Room& room) {
#ifdef HAGO_TILES
  if (job.c.steps) return by_tiles(job, first, count, begin, end, room);
#endif
  if (job.c.winograd) return by_winograd(job, first, count, begin, end, room);
#ifdef HAGO_PAIRS
  if (job.c.four_starts && turns(job.c)) return by_fours(copied(job, begin, end, room), first, count, begin, end);
  if (job.c.four_starts) return by_fours(job, first, count, begin, end);
#endif
  if (job.c.widens) return some_panels(copied(job, begin, end, room), first, count, begin, end);
  some_panels(job, first, count, begin, end);
}

// The most output channels of a panel.
extern "C" int hago_widest_panel() { return WIDEST; }

// Whether the target adds products of bytes, as `Dots` has it; where it does not, weights are words.
extern "C" int hago_adds_bytes(int by_channel) { return by_channel ? DOTS_BYTES_BY_CHANNEL : DOTS_BYTES; }

// Whether bytes are read as signed ones, not as unsigned ones.
extern "C" int hago_reads_signed() { return TURNS_UNSIGNED; }

extern "C" void hago_conv(const Conv* conv, const Shape* shape, const Tail* tail, const uint8_t* x, int threads) {
  const Padded images(*conv, *shape, x, threads);
  const Job j(images.conv, images.shape, *tail, images.x);
  const int64_t pixels = shape->images * shape->out_height * shape->out_width;
  int64_t part = std::max<int64_t>(1, (pixels + threads - 1) / threads);
  if (const int64_t rows = conv->winograd * shape->out_width) part += rows - 1 - (part - 1) % rows;  // whole squares
  // few pixels are shared out by panels
  const int64_t block = std::min(block_of(images.conv, images.shape), part);
  const int64_t blocks = (pixels + block - 1) / block;
  const int all = conv->panel ? conv->groups * conv->panels : 1;
  const int64_t units = (2 * threads + blocks - 1) / blocks;  // of a block, so that no thread waits long for others
  // panels that are computed together transform windows once
  const int share = units == 1 || threads == 1 ? all : conv->winograd ? std::max<int>(1, all / units) : 1;
  const int shares = (all + share - 1) / share;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Room room;
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < blocks * shares; ++unit) {
      const int64_t begin = unit / shares * block, end = std::min(pixels, begin + block);
      const int first = (int)(unit % shares) * share;
      if (conv->panel) by_panels(j, first, std::min(share, all - first), begin, end, room);
      else by_channel(j, begin, end, room);
    }
  }
}
