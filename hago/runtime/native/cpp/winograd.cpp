// Convolutions by 3 x 3 weights with stride 1, two by two output pixels at a time: Winograd's F(2 x 2, 3 x 3) takes 16
// products for each input channel where the windows of the four pixels have 36. Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks", 2016, section 4.1.
//
// Sums are the same integers as in conv.cpp. Weights are transformed by twice the matrix G, so everything is an integer.
// A transformed value adds four values, each within 255 of the zero point, and a transformed weight nine weights within
// 128: words hold both. The sums of products are modulo 2**32, and so is the transform back, but what it gives is four
// times the sum of a pixel, which int32 holds for the weights that `sums_fit_winograd` of weights.py takes.
#include "accumulate.h"
#include "conv.h"

namespace {

constexpr int SIDE = 4, POINTS = SIDE * SIDE;  // of the windows of four pixels, and of what they are transformed to

// Two by two output pixels: the place of the first window, and the pixels; -1 for those that are not computed.
struct Square {
  const uint8_t* image;
  int64_t y, x;
  int64_t pixel[4];
};

// Squares that hold the output pixels [begin, end).
std::vector<Square> squares_of(const Job& j, int64_t begin, int64_t end) {
  std::vector<Square> squares;
  const int64_t across = j.s.out_width, plane = j.s.out_height * across;
  const int64_t size = j.s.height * j.s.width * stored_pixel(j.c);
  while (begin < end) {
    const int64_t image = begin / plane, start = image * plane, until = std::min(end, start + plane);
    for (int64_t y = (begin - start) / across; start + y * across < until; y += 2)
      for (int64_t x = 0; x < across; x += 2) {
        Square s{j.x + image * size, y - j.c.pad_h, x - j.c.pad_w, {}};
        bool some = false;
        for (int k = 0; k < 4; ++k) {
          const int64_t pixel = start + (y + k / 2) * across + x + k % 2;
          const bool inside = x + k % 2 < across && pixel >= begin && pixel < until;
          s.pixel[k] = inside ? pixel : -1;
          some = some || inside;
        }
        if (some) squares.push_back(s);
      }
    begin = until;
  }
  return squares;
}

// The windows of a square for the `each` channels from `from` on, transformed: B'dB. The values of a point lie `pitch`
// after those of the one before. Outside of the image is `around`.
template <typename T>
void transform(const Job& j, const Square& s, int64_t from, int64_t each, const T* around, int16_t* to, int64_t pitch) {
  const T* at[SIDE][SIDE];
  for (int y = 0; y < SIDE; ++y)
    for (int x = 0; x < SIDE; ++x) {
      const bool inside = (uint64_t)(s.y + y) < (uint64_t)j.s.height && (uint64_t)(s.x + x) < (uint64_t)j.s.width;
      const int64_t pixel = (s.y + y) * j.s.width + s.x + x;
      at[y][x] = inside ? reinterpret_cast<const T*>(s.image) + pixel * stored_pixel(j.c) + from : around;
    }
  // zero points cancel out of differences; only point (1, 1) adds four values
  const Vec zeros = all_words((int16_t)(4 * j.c.zero));
  const auto across = [](const Vec(&d)[SIDE], Vec(&t)[SIDE]) __attribute__((always_inline)) {
    t[0] = subtract_words(d[0], d[2]);
    t[1] = add_words(d[1], d[2]);
    t[2] = subtract_words(d[2], d[1]);
    t[3] = subtract_words(d[1], d[3]);
  };
  for (int64_t channel = 0; channel < each; channel += WORDS) {
    const int64_t i = std::min<int64_t>(channel, each - WORDS);  // the last ones are computed again
    Vec rows[SIDE][SIDE];
#pragma GCC unroll 4
    for (int y = 0; y < SIDE; ++y) {
      const Vec d[SIDE] = {widen_vec(at[y][0] + i), widen_vec(at[y][1] + i), widen_vec(at[y][2] + i),
                           widen_vec(at[y][3] + i)};
      across(d, rows[y]);
    }
#pragma GCC unroll 4
    for (int x = 0; x < SIDE; ++x) {
      const Vec d[SIDE] = {rows[0][x], rows[1][x], rows[2][x], rows[3][x]};
      Vec t[SIDE];
      across(d, t);
      if (x == 1) t[1] = subtract_words(t[1], zeros);
#pragma GCC unroll 4
      for (int y = 0; y < SIDE; ++y) store_vec(to + (SIDE * y + x) * pitch + i, t[y]);
    }
  }
}

// The sums of four pixels, from those of the points: A'MA.
ALWAYS void transform_back(const int32_t* points, int64_t pitch, Ints (&sums)[4]) {
  Ints rows[2][SIDE];
#pragma GCC unroll 4
  for (int x = 0; x < SIDE; ++x) {
    const Ints a = load_ints(points + x * pitch), b = load_ints(points + (SIDE + x) * pitch);
    const Ints c = load_ints(points + (2 * SIDE + x) * pitch), d = load_ints(points + (3 * SIDE + x) * pitch);
    rows[0][x] = add(add(a, b), c);
    rows[1][x] = subtract(subtract(b, c), d);
  }
#pragma GCC unroll 2
  for (int y = 0; y < 2; ++y) {
    const Ints(&m)[SIDE] = rows[y];
    sums[2 * y] = quarter(add(add(m[0], m[1]), m[2]));
    sums[2 * y + 1] = quarter(subtract(subtract(m[1], m[2]), m[3]));
  }
}

// The transformed windows of a group's channels, in `room` until that is used again. Those of a point are rows of
// `each` words, one for every square.
struct Transformed {
  const std::vector<Square>& squares;
  const int16_t* values;
  int64_t each, pitch;

  Transformed(const Job& j, int group, const std::vector<Square>& squares, Room& room)
      : squares(squares), each(stored_pixel(j.c) / j.c.groups),
        pitch((((int64_t)squares.size() * each * 2 + 63) / 64 | 1) * 32) {
    // an odd number of lines from one point to the next has them lie in different sets of the cache
    int16_t* to = reinterpret_cast<int16_t*>(room.of(POINTS * pitch * sizeof(int16_t)));
    values = to;
    const std::vector<uint8_t> around(each, (uint8_t)j.c.zero);
    for (size_t i = 0; i < squares.size(); ++i) {
      int16_t* here = to + i * each;
      if (j.c.values == U8) transform<uint8_t>(j, squares[i], group * each, each, around.data(), here, pitch);
      else transform<int8_t>(j, squares[i], group * each, each, (const int8_t*)around.data(), here, pitch);
    }
  }
};

// A panel of output channels of R squares from `first` on; those past the last are computed and dropped.
template <int R, int Z>
void squares_by_panel(const Job& j, const Transformed& t, int group, int panel, int64_t first) {
  const Conv& c = j.c;
  const int of_group = c.out_channels / c.groups, number = group * c.panels + panel;
  const int width = std::min(c.panel, of_group - panel * c.panel), column = group * of_group + panel * c.panel;
  constexpr int lanes = LANES * Z;
  const int count = (int)std::min<int64_t>(R, t.squares.size() - first);
  alignas(64) int32_t done[4 * R * lanes];
  int64_t order[4 * R];
  int row[R][4], rows = 0;  // of `done`, where a pixel is computed
  for (int r = 0; r < count; ++r)
    for (int k = 0; k < 4; ++k) {
      const int64_t pixel = t.squares[first + r].pixel[k];
      row[r][k] = pixel < 0 ? -1 : rows;
      if (pixel >= 0) order[rows++] = pixel;
    }
  const Tile tile{done, rows, lanes, width, column, 0, column, order};
  if (j.end_form == ANY) bring_near(j.t, tile);

  alignas(64) int32_t points[POINTS][R][lanes];
  const int8_t* weight = c.weight + (int64_t)number * POINTS * c.depth * lanes;
  for (int p = 0; p < POINTS; ++p, weight += c.depth * lanes) {
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
      Ints sums[4];
      transform_back(&points[0][r][LANES * z], R * lanes, sums);
      for (int k = 0; k < 4; ++k)
        if (row[r][k] >= 0) store_16(done + row[r][k] * lanes + LANES * z, add(sums[k], offset), All{});
    }
  }
  end_rows(j, tile);
}

template <int R, int Z>
void all_squares(const Job& j, const Transformed& t, int group, int panel) {
  const int64_t count = t.squares.size();
  for (int64_t first = 0; first < count; first += R) {
    if (count - first <= R / 2) squares_by_panel<(R + 1) / 2, Z>(j, t, group, panel, first);
    else squares_by_panel<R, Z>(j, t, group, panel, first);
  }
}

void one_panel(const Job& j, const Transformed& t, int group, int panel) {
#ifdef HAGO_AVX512
  switch (j.c.panel / LANES) {
    case 2: return all_squares<ROWS_OF[2], 2>(j, t, group, panel);
    case 3: return all_squares<ROWS_OF[3], 3>(j, t, group, panel);
    case 4: return all_squares<ROWS_OF[4], 4>(j, t, group, panel);
  }
#endif
  all_squares<ROWS_OF[1], 1>(j, t, group, panel);
}

}  // namespace

// The fewest channels of a group for which there are transforms; 0 if products of bytes are faster.
extern "C" int hago_winograd_channels() { return DOTS_BYTES == EXACTLY ? 0 : WORDS; }

void by_winograd(const Job& j, int first, int count, int64_t begin, int64_t end, Room& room) {
  const std::vector<Square> squares = squares_of(j, begin, end);
  for (int p = first; p < first + count;) {
    const int group = p / j.c.panels;
    const Transformed t(j, group, squares, room);
    for (; p < first + count && p / j.c.panels == group; ++p) one_panel(j, t, group, p % j.c.panels);
  }
}
