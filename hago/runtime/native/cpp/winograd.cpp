// Convolutions by 3 x 3 weights with stride 1, a square of N by N output pixels at a time, N 2 or 4: Winograd's
// F(2 x 2, 3 x 3) takes 16 products for each input channel where the windows of the four pixels have 36, F(4 x 4, 3 x 3)
// takes 36 where those of sixteen pixels have 144. Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks",
// 2016, section 4.
//
// Sums are the same integers as in conv.cpp. Weights are transformed by a whole multiple of the matrix G, so everything
// is an integer; see `WINOGRAD` of weights.py. Words hold the transformed values, which add those of a window less its
// zero point, with factors of which those of one sign sum to 4 or 68 at most, and the transformed weights. The sums of
// products are modulo 2**32, and so is the transform back. Of N = 2 it gives four times the sum of a pixel, which int32
// holds for the weights that `sums_fit_winograd` takes; of N = 4, 576 times the sum modulo 2**32: times the inverse of 9
// this is 64 times the sum, which int32 holds for such weights.
#include "accumulate.h"
#include "conv.h"

namespace {

// N by N output pixels: the place of the first window, and the pixels; -1 for those that are not computed.
template <int N>
struct Square {
  static constexpr int SIDE = N + 2, POINTS = SIDE * SIDE;  // of its windows, and of what they are transformed to

  const uint8_t* image;
  int64_t y, x;
  int64_t pixel[N * N];
};

// Squares that hold the output pixels [begin, end).
template <int N>
std::vector<Square<N>> squares_of(const Job& j, int64_t begin, int64_t end) {
  std::vector<Square<N>> squares;
  const int64_t across = j.s.out_width, plane = j.s.out_height * across;
  const int64_t size = j.s.height * j.s.width * stored_pixel(j.c);
  while (begin < end) {
    const int64_t image = begin / plane, start = image * plane, until = std::min(end, start + plane);
    for (int64_t y = (begin - start) / across; start + y * across < until; y += N)
      for (int64_t x = 0; x < across; x += N) {
        Square<N> s{j.x + image * size, y - j.c.pad_h, x - j.c.pad_w, {}};
        bool some = false;
        for (int k = 0; k < N * N; ++k) {
          const int64_t pixel = start + (y + k / N) * across + x + k % N;
          const bool inside = x + k % N < across && pixel >= begin && pixel < until;
          s.pixel[k] = inside ? pixel : -1;
          some = some || inside;
        }
        if (some) squares.push_back(s);
      }
    begin = until;
  }
  return squares;
}

ALWAYS Vec twice_words(Vec a) { return add_words(a, a); }
ALWAYS Ints twice(Ints a) { return add(a, a); }

// A row of windows, transformed: B'd.
ALWAYS void across(const Vec (&d)[4], Vec (&t)[4]) {
  t[0] = subtract_words(d[0], d[2]);
  t[1] = add_words(d[1], d[2]);
  t[2] = subtract_words(d[2], d[1]);
  t[3] = subtract_words(d[1], d[3]);
}
ALWAYS void across(const Vec (&d)[6], Vec (&t)[6]) {
  const Vec a = subtract_words(d[4], d[2]), b = twice_words(subtract_words(d[3], d[1]));
  t[0] = add_words(twice_words(twice_words(subtract_words(d[0], d[2]))), a);
  t[1] = subtract_words(add_words(d[3], d[4]), twice_words(twice_words(add_words(d[1], d[2]))));
  t[2] = add_words(subtract_words(d[4], d[3]), twice_words(twice_words(subtract_words(d[1], d[2]))));
  t[3] = add_words(a, b);
  t[4] = subtract_words(a, b);
  t[5] = subtract_words(subtract_words(d[5], d[3]), twice_words(b));
}

// The windows of a square for the `each` channels from `from` on, transformed: B'dB. The values of a point lie `pitch`
// after those of the one before. Outside of the image is `around`.
template <int N, typename T>
void transform(const Job& j, const Square<N>& s, int64_t from, int64_t each, const T* around, int16_t* to,
               int64_t pitch) {
  constexpr int SIDE = Square<N>::SIDE;
  const T* at[SIDE][SIDE];
  for (int y = 0; y < SIDE; ++y)
    for (int x = 0; x < SIDE; ++x) {
      const bool inside = (uint64_t)(s.y + y) < (uint64_t)j.s.height && (uint64_t)(s.x + x) < (uint64_t)j.s.width;
      const int64_t pixel = (s.y + y) * j.s.width + s.x + x;
      at[y][x] = inside ? reinterpret_cast<const T*>(s.image) + pixel * stored_pixel(j.c) + from : around;
    }
  // the factors of every point but (1, 1) sum to zero, so that zero points cancel out
  const Vec zeros = all_words((int16_t)((N == 2 ? 2 * 2 : 6 * 6) * j.c.zero));
  for (int64_t channel = 0; channel < each; channel += WORDS) {
    const int64_t i = std::min<int64_t>(channel, each - WORDS);  // the last ones are computed again
    Vec rows[SIDE][SIDE];
#pragma GCC unroll 6
    for (int y = 0; y < SIDE; ++y) {
      Vec d[SIDE];
#pragma GCC unroll 6
      for (int x = 0; x < SIDE; ++x) d[x] = widen_vec(at[y][x] + i);
      across(d, rows[y]);
    }
#pragma GCC unroll 6
    for (int x = 0; x < SIDE; ++x) {
      Vec d[SIDE], t[SIDE];
#pragma GCC unroll 6
      for (int y = 0; y < SIDE; ++y) d[y] = rows[y][x];
      across(d, t);
      if (x == 1) t[1] = subtract_words(t[1], zeros);
#pragma GCC unroll 6
      for (int y = 0; y < SIDE; ++y) store_vec(to + (SIDE * y + x) * pitch + i, t[y]);
    }
  }
}

// A row of sums, from those of a row of points: A'm.
ALWAYS void back(const Ints (&m)[4], Ints (&sums)[2]) {
  sums[0] = add(add(m[0], m[1]), m[2]);
  sums[1] = subtract(subtract(m[1], m[2]), m[3]);
}
ALWAYS void back(const Ints (&m)[6], Ints (&sums)[4]) {
  const Ints a = add(m[1], m[2]), b = subtract(m[1], m[2]), c = add(m[3], m[4]), d = twice(subtract(m[3], m[4]));
  sums[0] = add(add(m[0], a), c);
  sums[1] = add(b, d);
  sums[2] = add(a, twice(twice(c)));
  sums[3] = add(b, twice(add(twice(d), m[5])));  // of the half of what the other points are multiplied by
}

// What the transforms multiply sums by is taken out.
template <int N>
ALWAYS Ints divided(Ints a) {
  if constexpr (N == 2) return shift_right<2>(a);
  else return shift_right<6>(times(a, 0x38E38E39));  // 9 times this is 1 modulo 2**32
}

// The sums of the pixels of a square, from those of the points: A'MA.
template <int N>
ALWAYS void transform_back(const int32_t* points, int64_t pitch, Ints (&sums)[N * N]) {
  constexpr int SIDE = Square<N>::SIDE;
  Ints rows[N][SIDE];
#pragma GCC unroll 6
  for (int x = 0; x < SIDE; ++x) {
    Ints m[SIDE], column[N];
#pragma GCC unroll 6
    for (int y = 0; y < SIDE; ++y) m[y] = load_ints(points + (SIDE * y + x) * pitch);
    back(m, column);
#pragma GCC unroll 4
    for (int y = 0; y < N; ++y) rows[y][x] = column[y];
  }
#pragma GCC unroll 4
  for (int y = 0; y < N; ++y) {
    Ints row[N];
    back(rows[y], row);
#pragma GCC unroll 4
    for (int x = 0; x < N; ++x) sums[N * y + x] = divided<N>(row[x]);
  }
}

// The transformed windows of a group's channels, in `room` until that is used again. Those of a point are rows of
// `each` words, one for every square.
template <int N>
struct Transformed {
  const std::vector<Square<N>>& squares;
  const int16_t* values;
  int64_t each, pitch;

  Transformed(const Job& j, int group, const std::vector<Square<N>>& squares, Room& room)
      : squares(squares), each(stored_pixel(j.c) / j.c.groups),
        pitch((((int64_t)squares.size() * each * 2 + 63) / 64 | 1) * 32) {
    // an odd number of lines from one point to the next has them lie in different sets of the cache
    int16_t* to = reinterpret_cast<int16_t*>(room.of(Square<N>::POINTS * pitch * sizeof(int16_t)));
    values = to;
    const std::vector<uint8_t> around(each, (uint8_t)j.c.zero);
    for (size_t i = 0; i < squares.size(); ++i) {
      int16_t* here = to + i * each;
      if (j.c.values == U8) transform<N, uint8_t>(j, squares[i], group * each, each, around.data(), here, pitch);
      else transform<N, int8_t>(j, squares[i], group * each, each, (const int8_t*)around.data(), here, pitch);
    }
  }
};

// A panel of output channels of R squares from `first` on; those past the last are computed and dropped.
template <int N, int R, int Z>
void squares_by_panel(const Job& j, const Transformed<N>& t, int group, int panel, int64_t first) {
  const Conv& c = j.c;
  const int of_group = c.out_channels / c.groups, number = group * c.panels + panel;
  const int width = std::min(c.panel, of_group - panel * c.panel), column = group * of_group + panel * c.panel;
  constexpr int lanes = LANES * Z;
  const int count = (int)std::min<int64_t>(R, t.squares.size() - first);
  alignas(64) int32_t done[N * N * R * lanes];
  int64_t order[N * N * R];
  int row[R][N * N], rows = 0;  // of `done`, where a pixel is computed
  for (int r = 0; r < count; ++r)
    for (int k = 0; k < N * N; ++k) {
      const int64_t pixel = t.squares[first + r].pixel[k];
      row[r][k] = pixel < 0 ? -1 : rows;
      if (pixel >= 0) order[rows++] = pixel;
    }
  const Tile tile{done, rows, lanes, width, column, 0, column, order};
  if (j.end_form == ANY) bring_near(j.t, tile);

  alignas(64) int32_t points[Square<N>::POINTS][R][lanes];
  const int8_t* weight = c.weight + (int64_t)number * Square<N>::POINTS * c.depth * lanes;
  for (int p = 0; p < Square<N>::POINTS; ++p, weight += c.depth * lanes) {
    const uint8_t* x[R];
    for (int r = 0; r < R; ++r)
      x[r] = reinterpret_cast<const uint8_t*>(t.values + p * t.pitch + (first + (r < count ? r : 0)) * t.each);
    Ints acc[R][Z];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) acc[r][z] = all_ints(0);
    accumulate<R, Z, I16>(acc, x, weight, c.depth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int z = 0; z < Z; ++z) store_16(&points[p][r][LANES * z], acc[r][z], All{});
  }

  for (int z = 0; z < Z; ++z) {
    const Ints offset = load_ints(c.offset + number * c.panel + LANES * z);
    for (int r = 0; r < count; ++r) {
      Ints sums[N * N];
      transform_back<N>(&points[0][r][LANES * z], R * lanes, sums);
      for (int k = 0; k < N * N; ++k)
        if (row[r][k] >= 0) store_16(done + row[r][k] * lanes + LANES * z, add(sums[k], offset), All{});
    }
  }
  end_rows(j, tile);
}

template <int N, int R, int Z>
void all_squares(const Job& j, const Transformed<N>& t, int group, int panel) {
  const int64_t count = t.squares.size();
  for (int64_t first = 0; first < count; first += R) {
    if (count - first <= R / 2) squares_by_panel<N, (R + 1) / 2, Z>(j, t, group, panel, first);
    else squares_by_panel<N, R, Z>(j, t, group, panel, first);
  }
}

template <int N>
void one_panel(const Job& j, const Transformed<N>& t, int group, int panel) {
#ifdef HAGO_AVX512
  switch (j.c.panel / LANES) {
    case 2: return all_squares<N, ROWS_OF[2], 2>(j, t, group, panel);
    case 3: return all_squares<N, ROWS_OF[3], 3>(j, t, group, panel);
    case 4: return all_squares<N, ROWS_OF[4], 4>(j, t, group, panel);
  }
#endif
  all_squares<N, ROWS_OF[1], 1>(j, t, group, panel);
}

template <int N>
void by_squares(const Job& j, int first, int count, int64_t begin, int64_t end, Room& room) {
  const std::vector<Square<N>> squares = squares_of<N>(j, begin, end);
  for (int p = first; p < first + count;) {
    const int group = p / j.c.panels;
    const Transformed<N> t(j, group, squares, room);
    for (; p < first + count && p / j.c.panels == group; ++p) one_panel<N>(j, t, group, p % j.c.panels);
  }
}

}  // namespace

// The fewest channels of a group for which transforms may pay, and no fewer than they compute at once; 0 if products of
// bytes are faster in any case. VNNI multiplies half as many words as bytes at once; four times fewer products, and
// transforms that 64 channels share, take less time on some processors, see timing.py. Dot products of NEON multiply a
// quarter as many words.
static_assert(WORDS <= 64);
extern "C" int hago_winograd_channels() {
#if defined(HAGO_TILES) || defined(__aarch64__)
  return DOTS_BYTES == EXACTLY ? 0 : WORDS;
#else
  return DOTS_BYTES == EXACTLY ? 64 : WORDS;
#endif
}

void by_winograd(const Job& j, int first, int count, int64_t begin, int64_t end, Room& room) {
  if (j.c.winograd == 2) by_squares<2>(j, first, count, begin, end, room);
  else by_squares<4>(j, first, count, begin, end, room);
}
