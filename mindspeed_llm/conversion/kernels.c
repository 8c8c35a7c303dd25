// The loops that decide how fast a conversion is: the same bits as torch and zlib give.
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// out[r][c] = bf16(fp32(e4m3fn weight[r][c]) * scale[c]), rounded to nearest even; scales are finite, strides in
// elements.
void dequantize_rows(const uint8_t *weight, long weight_stride, const float *scale, long rows, long columns,
                     uint16_t *out, long out_stride) {
  for (long r = 0; r < rows; ++r) {
    const uint8_t *restrict in = weight + r * weight_stride;
    uint16_t *restrict to = out + r * out_stride;
    for (long c = 0; c < columns; ++c) {
      uint32_t code = in[c], magnitude = code & 0x7f;
      // Exponents are rebased from 7 to 127; below 8 the code counts steps of 2^-9; 0x7f is not a number.
      uint32_t normal = (magnitude << 20) + (120u << 23), small = as_bits((float)(int32_t)magnitude * 0x1p-9f);
      uint32_t value = magnitude < 8 ? small : normal;
      uint32_t bits = as_bits(as_float(value | (code & 0x80) << 24) * scale[c]);
      uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      to[c] = (uint16_t)(magnitude == 0x7f ? 0x7fc0 : rounded);
    }
  }
}

typedef uint16_t Row __attribute__((vector_size(16)));  // 8 elements
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)

// Rows i and i + 4 interleaved, three times, turn a square of 8 x 8.
static inline void turn8(const uint16_t *in, long in_stride, uint16_t *out, long out_stride) {
  Row a[8], b[8];
  for (int i = 0; i < 8; ++i) memcpy(&a[i], in + i * in_stride, sizeof a[i]);
  for (int i = 0; i < 4; ++i) b[2 * i] = LOW(a[i], a[i + 4]), b[2 * i + 1] = HIGH(a[i], a[i + 4]);
  for (int i = 0; i < 4; ++i) a[2 * i] = LOW(b[i], b[i + 4]), a[2 * i + 1] = HIGH(b[i], b[i + 4]);
  for (int i = 0; i < 4; ++i) b[2 * i] = LOW(a[i], a[i + 4]), b[2 * i + 1] = HIGH(a[i], a[i + 4]);
  for (int i = 0; i < 8; ++i) memcpy(out + i * out_stride, &b[i], sizeof b[i]);
}

enum { TILE = 32 };  // a cache line each way

// out[c][r] = in[r][c] of 2-byte elements, rows and columns of the input; strides in elements.
void transpose16(const uint16_t *in, long in_stride, long rows, long columns, uint16_t *out, long out_stride) {
  for (long r = 0; r < rows; r += TILE)
    for (long c = 0; c < columns; c += TILE) {
      if (r + TILE <= rows && c + TILE <= columns) {
        uint16_t tile[TILE][TILE];
        for (int i = 0; i < TILE; i += 8)
          for (int j = 0; j < TILE; j += 8) turn8(in + (r + i) * in_stride + c + j, in_stride, &tile[j][i], TILE);
        for (int j = 0; j < TILE; ++j) memcpy(out + (c + j) * out_stride + r, tile[j], sizeof tile[j]);
        continue;
      }
      for (long i = r; i < rows && i < r + TILE; ++i)
        for (long j = c; j < columns && j < c + TILE; ++j) out[j * out_stride + i] = in[i * in_stride + j];
    }
}

#if defined(__PCLMUL__) && defined(__SSE4_1__)
#include <immintrin.h>

static inline __m128i load(const uint8_t *at) { return _mm_loadu_si128((const __m128i *)at); }

// A polynomial of 128 bits moved forward by the distance that the two keys stand for, and the next 16 bytes added.
static inline __m128i fold(__m128i value, __m128i keys, __m128i next) {
  __m128i low = _mm_clmulepi64_si128(value, keys, 0x00), high = _mm_clmulepi64_si128(value, keys, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The CRC-32 of zip, continued from `crc`, of `length` bytes: a multiple of 16, at least 64 (Gopal et al., Intel 2009).
uint32_t crc32_blocks(const uint8_t *data, long length, uint32_t crc) {
  const __m128i by64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128((int)~crc));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  for (data += 64, length -= 64; length >= 64; data += 64, length -= 64) {
    a = fold(a, by64, load(data)), b = fold(b, by64, load(data + 16));
    c = fold(c, by64, load(data + 32)), d = fold(d, by64, load(data + 48));
  }
  a = fold(fold(fold(a, by16, b), by16, c), by16, d);
  for (; length >= 16; data += 16, length -= 16) a = fold(a, by16, load(data));
  uint8_t left[16];
  _mm_storeu_si128((__m128i *)left, a);
  uint32_t rest = 0;
  for (int i = 0; i < 16; ++i) {
    rest ^= left[i];
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (0xedb88320u & -(rest & 1));
  }
  return ~rest;
}
#endif
