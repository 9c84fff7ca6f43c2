/* The canonical arithmetic, fast. `plain.py` defines it; `compiled.py` builds this file, and tells what each function
 * takes.
 *
 * Every result follows from its inputs by IEEE operations in one order, whatever the processor: sixteen lanes
 * are one vector of AVX-512, two of AVX2 or four of NEON. The compiler must not change that: no -ffast-math,
 * and -ffp-contract=off, so that a multiplication and an addition are fused where the source says so
 * (`fused`, in linear layers) and nowhere else. Loops over rows, outputs and heads may be divided in any way,
 * since no result is shared between them.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP /* its header need not be there */
int omp_get_thread_num(void);
int omp_get_num_threads(void);
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 16
#define BLOCK                                                                                                \
    64 /* positions whose values are summed one after another, before their sum is added to those of the     \
          blocks before */
#define QUERIES 4 /* rows and heads that share what is read of keys and values */

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define TILE_ROWS 4
#define TILE_OUTPUTS 4
#define OUTPUTS_ALONE 8
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VECTOR_BYTES 32
#define TILE_ROWS 2
#define TILE_OUTPUTS 3
#define OUTPUTS_ALONE 6
#else
#define VECTOR_BYTES 16
#define TILE_ROWS 2
#define TILE_OUTPUTS 3
#define OUTPUTS_ALONE 6
#endif
#define WIDTH (VECTOR_BYTES / 4)
#define PARTS (LANES / WIDTH)
#define PRODUCTS_MIN 100000 /* some ten microseconds of work, for which another thread is worth waking */
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
typedef float loose __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef int32_t integers __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t shorts __attribute__((vector_size(VECTOR_BYTES / 2)));

enum { FLOAT32, BFLOAT16, FLOAT16, LEVELS8 }; /* the last of a cache alone, with steps between levels */

INLINE vector all(float value) { return value - (vector){0}; } /* x - 0 is x, whatever x is */

INLINE vector load(const float *from) { return *(const loose *)from; }

INLINE void store(float *to, vector value) { *(loose *)to = value; }

/* a * b + c with one rounding. */
INLINE vector fused(vector a, vector b, vector c) {
#if defined(__AVX512F__)
    return (vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VECTOR_BYTES == 32
    return (vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    vector sum;
    for (int i = 0; i < WIDTH; i++)
        sum[i] = fmaf(a[i], b[i], c[i]);
    return sum;
#endif
}

INLINE float from_half(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#elif defined(__aarch64__)
    __fp16 half;
    memcpy(&half, &bits, 2);
    return half;
#else
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) { /* zero, or a number below the smallest normal one: a whole number of 2^-24 */
        float small = (float)fraction * 0x1p-24f;
        return sign ? -small : small;
    }
    uint32_t wide = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    float value;
    memcpy(&value, &wide, 4);
    return value;
#endif
}

/* WIDTH numbers of that kind, beginning with the one at `at`. */
INLINE vector widened(const void *from, int64_t at, int kind) {
    if (kind == FLOAT32)
        return load((const float *)from + at);
    const uint16_t *short_ones = (const uint16_t *)from + at;
    if (kind == BFLOAT16) {
#if defined(__AVX512F__)
        return (vector)_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)short_ones)), 16);
#elif VECTOR_BYTES == 32
        return (vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)short_ones)),
                                         16);
#elif defined(__aarch64__)
        return (vector)vshll_n_u16(vld1_u16(short_ones), 16);
#else
        integers bits;
        for (int i = 0; i < WIDTH; i++)
            bits[i] = (int32_t)((uint32_t)short_ones[i] << 16);
        return (vector)bits;
#endif
    }
#if defined(__AVX512F__)
    return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)short_ones));
#elif VECTOR_BYTES == 32
    return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)short_ones));
#elif defined(__aarch64__)
    return (vector)vcvt_f32_f16(vld1_f16((const __fp16 *)short_ones));
#else
    vector value;
    for (int i = 0; i < WIDTH; i++)
        value[i] = from_half(short_ones[i]);
    return value;
#endif
}

/* WIDTH levels. */
INLINE vector widened_levels(const int8_t *from) {
#if defined(__AVX512F__)
    return (vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif VECTOR_BYTES == 32
    return (vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(__aarch64__)
    int32_t four;
    memcpy(&four, from, 4);
    int8x8_t levels = vreinterpret_s8_s32(vdup_n_s32(four));
    return (vector)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(levels))));
#else
    vector value;
    for (int i = 0; i < WIDTH; i++)
        value[i] = from[i];
    return value;
#endif
}

INLINE float widened_one(const void *from, int64_t at, int kind) {
    if (kind == FLOAT32)
        return ((const float *)from)[at];
    uint16_t bits = ((const uint16_t *)from)[at];
    if (kind == FLOAT16)
        return from_half(bits);
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* The nearest number of a kind, of two the even one. What is no number gets one form. */
INLINE void narrow_one(void *to, int64_t at, int kind, float value) {
    uint32_t bits, sign;
    if (kind == FLOAT32) {
        ((float *)to)[at] = value;
        return;
    }
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    uint16_t *found = (uint16_t *)to + at;
    if (kind == BFLOAT16)
        *found = (uint16_t)(sign | (bits > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16));
    else if (bits > 0x7f800000)
        *found = (uint16_t)(sign | 0x7e00);
    else if (bits >= 0x477ff000) /* nearer to 2^16 than to the largest number, or as near */
        *found = (uint16_t)(sign | 0x7c00);
    else if (bits >= 0x38800000)
        *found = (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
    else { /* a whole number of 2^-24: the last digit of a sum with a half */
        float sum = fabsf(value) + 0.5f;
        memcpy(&bits, &sum, 4);
        *found = (uint16_t)(sign | (bits - 0x3f000000));
    }
}

/* WIDTH numbers, each as `narrow_one` does it. */
INLINE void narrow(void *to, int64_t at, int kind, vector value) {
    if (kind == FLOAT32) {
        store((float *)to + at, value);
        return;
    }
    uint16_t *found = (uint16_t *)to + at;
    if (kind == BFLOAT16) {
        integers bits = (integers)value, size = bits & 0x7fffffff;
        integers near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, none = (bits >> 16 & 0x8000) | 0x7fc0;
        integers where = size > 0x7f800000;
        shorts narrowed = __builtin_convertvector((near & ~where) | (none & where), shorts);
        memcpy(found, &narrowed, sizeof narrowed);
        return;
    }
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)found, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif VECTOR_BYTES == 32
    _mm_storeu_si128((__m128i *)found, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    vst1_f16((__fp16 *)found, vcvt_f16_f32((float32x4_t)value));
#else
    for (int i = 0; i < WIDTH; i++)
        narrow_one(found, i, FLOAT16, value[i]);
#endif
}

/* All of `count` numbers as float32, and back. */
INLINE void widen_all(const void *from, int64_t at, int kind, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        store(to + i, widened(from, at + i, kind));
    for (; i < count; i++)
        to[i] = widened_one(from, at + i, kind);
}

INLINE void narrow_all(const float *from, int64_t count, void *to, int64_t at, int kind) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        narrow(to, at + i, kind, load(from + i));
    for (; i < count; i++)
        narrow_one(to, at + i, kind, from[i]);
}

#define WIDEN_ALL(kind, from, at, count, to) widen_all(from, at, kind, count, to)
#define NARROW_ALL(kind, from, count, to, at) narrow_all(from, count, to, at, kind)

/* The number as it is in a kind. */
INLINE float rounded_one(float value, int kind) {
    if (kind == FLOAT32)
        return value;
    uint16_t room;
    narrow_one(&room, 0, kind, value);
    return widened_one(&room, 0, kind);
}

/* The function that `name(kind, ...)` is for each kind, in which that is a constant. */
#define FOR_KIND(kind, name, ...)                                                                            \
    do {                                                                                                     \
        if ((kind) == FLOAT32)                                                                               \
            name(FLOAT32, __VA_ARGS__);                                                                      \
        else if ((kind) == BFLOAT16)                                                                         \
            name(BFLOAT16, __VA_ARGS__);                                                                     \
        else                                                                                                 \
            name(FLOAT16, __VA_ARGS__);                                                                      \
    } while (0)

/* The sixteen lanes in halves: lane i and lane i + 8, then i and i + 4, ... */
INLINE float lanes_sum(const vector *lanes) {
    typedef float quarter __attribute__((vector_size(16), may_alias));
    const quarter *at = (const quarter *)lanes;
    quarter four = (at[0] + at[2]) + (at[1] + at[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define SUMS_TOGETHER
/* The lanes of `first` in halves, then those of `second`: eight sums each of what were sixteen. */
INLINE vector halved(vector first, vector second) {
    return (vector)_mm512_shuffle_f32x4((__m512)first, (__m512)second, 0x44) +
           (vector)_mm512_shuffle_f32x4((__m512)first, (__m512)second, 0xee);
}

/* Of two vectors with two outputs each, whose lanes are eight: four outputs, in turn from the first and the
 * second, with four lanes. */
INLINE vector quartered(vector first, vector second) {
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    return (vector)_mm512_permutex2var_pd((__m512d)first, low, (__m512d)second) +
           (vector)_mm512_permutex2var_pd((__m512d)first, high, (__m512d)second);
}

/* And so on: eight outputs with two lanes. */
INLINE vector paired(vector first, vector second) {
    return (vector)_mm512_unpacklo_pd((__m512d)first, (__m512d)second) +
           (vector)_mm512_unpackhi_pd((__m512d)first, (__m512d)second);
}

INLINE vector single(vector first, vector second) {
    return (vector)_mm512_shuffle_ps((__m512)first, (__m512)second, 0x88) +
           (vector)_mm512_shuffle_ps((__m512)first, (__m512)second, 0xdd);
}

/* The sums of sixteen times sixteen lanes, each as `lanes_sum` gives it. */
INLINE vector sums_of_16(const vector *lanes) {
    vector eight[8], four[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        eight[i] = halved(lanes[i], lanes[i + 8]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        four[i] = quartered(eight[i], eight[i + 4]);
    return single(paired(four[0], four[1]), paired(four[2], four[3]));
}

/* Of eight times sixteen, in the first half of a vector. */
INLINE vector sums_of_8(const vector *lanes) {
    vector eight[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        eight[i] = halved(lanes[i], lanes[i + 4]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        four[i] = quartered(eight[i], eight[i + 2]);
    vector two = paired(four[0], four[1]), twice = single(two, two);
    return (vector)_mm512_permutexvar_pd(_mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6), (__m512d)twice);
}
#endif

/* ------------------------------------------------------------------------------------------------------
 * linear layers */

/* Of many rows: blocks that stay in a processor's caches, the second and third in the nearest one. */
#define ROWS_AT_ONCE 64
#define ROWS_IN_TURN 8
#define INPUTS_AT_ONCE 512
#define OUTPUTS_AT_ONCE 48
#define ROWS_FEW 32 /* for which no block is worth making */

/* Lane i sums inputs i, i + 16, ... with fused steps; the last inputs count as filled up with zeros; then the
 * lanes are summed. */
typedef struct {
    vector parts[PARTS];
} Lanes;

/* The sums of so many times sixteen lanes; there is room for SUMS_ROOM more. */
#define SUMS_ROOM 16
INLINE void sums_of_lanes(const Lanes *lanes, int64_t count, float *sums) {
    int64_t i = 0;
#ifdef SUMS_TOGETHER
    for (; i + 16 <= count; i += 16)
        store(sums + i, sums_of_16(&lanes[i].parts[0]));
    if (i + 8 <= count) {
        store(sums + i, sums_of_8(&lanes[i].parts[0]));
        i += 8;
    }
#endif
    for (; i < count; i++)
        sums[i] = lanes_sum(lanes[i].parts);
}

/* Adds the products of `count` inputs, whole lanes, to the lanes of some rows (at most TILE_ROWS) and some rows
 * of weights (at most OUTPUTS_ALONE), both constants where it is called. Rows of x are `in` apart, of weights
 * `stride`, of lanes `between`. */
INLINE void add_products(int rows, int outputs, const float *x, int64_t in, const void *w, int64_t stride,
                         int kind, int64_t count, Lanes *lanes, int64_t between) {
    Lanes sums[TILE_ROWS][OUTPUTS_ALONE];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++)
            sums[r][o] = lanes[r * between + o];
    for (int64_t i = 0; i < count; i += LANES)
#pragma GCC unroll 8
        for (int p = 0; p < PARTS; p++) {
            vector weights[OUTPUTS_ALONE];
#pragma GCC unroll 8
            for (int o = 0; o < outputs; o++)
                weights[o] = widened(w, o * stride + i + p * WIDTH, kind);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vector inputs = load(x + r * in + i + p * WIDTH);
#pragma GCC unroll 8
                for (int o = 0; o < outputs; o++)
                    sums[r][o].parts[p] = fused(inputs, weights[o], sums[r][o].parts[p]);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++)
            lanes[r * between + o] = sums[r][o];
}

/* Rows from r to `end` in tiles: ADD of a constant number of rows, from r on. */
#if TILE_ROWS == 4
#define IN_TILES(r, end, ADD)                                                                                \
    for (; (r) + 4 <= (end); (r) += 4)                                                                       \
        ADD(4);                                                                                              \
    if ((r) + 3 == (end))                                                                                    \
        ADD(3);                                                                                              \
    else                                                                                                     \
        IN_PAIRS(r, end, ADD)
#else
#define IN_TILES(r, end, ADD) IN_PAIRS(r, end, ADD)
#endif
#define IN_PAIRS(r, end, ADD)                                                                                \
    do {                                                                                                     \
        for (; (r) + 2 <= (end); (r) += 2)                                                                   \
            ADD(2);                                                                                          \
        if ((r) < (end))                                                                                     \
            ADD(1);                                                                                          \
    } while (0)

/* Of `count` (a constant) outputs from `first` on and few rows. */
INLINE void outputs_of_few(int count, const float *x, int64_t rows, int64_t in, const void *w, int kind,
                           int64_t first, float *y, int64_t out) {
    Lanes lanes[ROWS_FEW * OUTPUTS_ALONE];
    memset(lanes, 0, sizeof(Lanes) * rows * count);
    const int64_t whole = in / LANES * LANES;
    const void *weights = (const char *)w + first * in * (kind == FLOAT32 ? 4 : 2);
    int64_t r = 0;
#define ADD(some) add_products(some, count, x + r * in, in, weights, in, kind, whole, lanes + r * count, count)
    IN_TILES(r, rows, ADD);
#undef ADD
    for (r = 0; r < rows && whole < in; r++)
        for (int o = 0; o < count; o++) {
            vector *parts = lanes[r * count + o].parts;
            float a[LANES] = {0}, b[LANES] = {0};
            for (int64_t i = whole; i < in; i++) {
                a[i - whole] = x[r * in + i];
                b[i - whole] = widened_one(w, (first + o) * in + i, kind);
            }
            for (int p = 0; p < PARTS; p++)
                parts[p] = fused(load(a + p * WIDTH), load(b + p * WIDTH), parts[p]);
        }
    float sums[ROWS_FEW * OUTPUTS_ALONE + SUMS_ROOM];
    sums_of_lanes(lanes, rows * count, sums);
    for (r = 0; r < rows; r++)
        memcpy(y + r * out + first, sums + r * count, sizeof(float) * count);
}

INLINE void few_rows(const float *x, int64_t rows, int64_t in, const void *w, int kind, int64_t begin,
                     int64_t end, float *y, int64_t out) {
    int64_t o = begin;
    if (rows == 1)
        for (; o + OUTPUTS_ALONE <= end; o += OUTPUTS_ALONE)
            outputs_of_few(OUTPUTS_ALONE, x, 1, in, w, kind, o, y, out);
    for (; o + TILE_OUTPUTS <= end; o += TILE_OUTPUTS)
        outputs_of_few(TILE_OUTPUTS, x, rows, in, w, kind, o, y, out);
    for (; o < end; o++)
        outputs_of_few(1, x, rows, in, w, kind, o, y, out);
}

/* What a thread needs for many rows. */
typedef struct {
    Lanes lanes[ROWS_AT_ONCE * OUTPUTS_AT_ONCE];
    float wide[OUTPUTS_AT_ONCE * INPUTS_AT_ONCE];
} Blocks;

/* Of at most ROWS_AT_ONCE rows and OUTPUTS_AT_ONCE outputs from `first` on. Inputs are in blocks of
 * INPUTS_AT_ONCE, each with `between` rows, the last filled up to whole lanes with zeros. */
INLINE void block_of(const float *x, int64_t rows, int64_t between, int64_t in, const void *w, int kind,
                     int64_t first, int64_t outputs, float *y, int64_t out, Blocks *at) {
    memset(at->lanes, 0, sizeof(Lanes) * rows * OUTPUTS_AT_ONCE);
    for (int64_t begin = 0; begin < in; begin += INPUTS_AT_ONCE, x += between * INPUTS_AT_ONCE) {
        int64_t there = in - begin < INPUTS_AT_ONCE ? in - begin : INPUTS_AT_ONCE;
        int64_t count = (there + LANES - 1) / LANES * LANES;
        for (int64_t o = 0; o < outputs; o++) {
            int64_t from = (first + o) * in + begin, i = 0;
            float *wide = at->wide + o * INPUTS_AT_ONCE;
            for (; i + WIDTH <= there; i += WIDTH)
                store(wide + i, widened(w, from + i, kind));
            for (; i < count; i++)
                wide[i] = i < there ? widened_one(w, from + i, kind) : 0.0f;
        }
        for (int64_t turn = 0; turn < rows; turn += ROWS_IN_TURN)
            for (int64_t o = 0; o < outputs; o += TILE_OUTPUTS) { /* the last tile may go beyond `outputs` */
                int64_t r = turn, end = turn + ROWS_IN_TURN < rows ? turn + ROWS_IN_TURN : rows;
#define ADD(some)                                                                                            \
    add_products(some, TILE_OUTPUTS, x + r * INPUTS_AT_ONCE, INPUTS_AT_ONCE, at->wide + o * INPUTS_AT_ONCE,  \
                 INPUTS_AT_ONCE, FLOAT32, count, at->lanes + r * OUTPUTS_AT_ONCE + o, OUTPUTS_AT_ONCE)
                IN_TILES(r, end, ADD);
#undef ADD
            }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < outputs; o++)
            y[r * out + first + o] = lanes_sum(at->lanes[r * OUTPUTS_AT_ONCE + o].parts);
}

INLINE void many_rows(const float *x, int64_t rows, int64_t in, const void *w, int kind, int64_t begin,
                      int64_t end, float *y, int64_t out, Blocks *at) {
    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE)
        for (int64_t o = begin; o < end; o += OUTPUTS_AT_ONCE)
            block_of(x + r * INPUTS_AT_ONCE, rows - r < ROWS_AT_ONCE ? rows - r : ROWS_AT_ONCE, rows, in, w, kind,
                     o, end - o < OUTPUTS_AT_ONCE ? end - o : OUTPUTS_AT_ONCE, y + r * out, out, at);
}

/* Row `r` of `rows` to the blocks of inputs that `block_of` takes. */
INLINE void divide_row(const float *x, int64_t r, int64_t rows, int64_t in, float *to) {
    for (int64_t begin = 0; begin < in; begin += INPUTS_AT_ONCE, to += rows * INPUTS_AT_ONCE) {
        int64_t count = in - begin < INPUTS_AT_ONCE ? in - begin : INPUTS_AT_ONCE;
        memcpy(to + r * INPUTS_AT_ONCE, x + begin, sizeof(float) * count);
        memset(to + r * INPUTS_AT_ONCE + count, 0, sizeof(float) * (INPUTS_AT_ONCE - count));
    }
}

/* How many of the threads are worth waking for so many products. */
INLINE int worthwhile(int threads, int64_t products) {
    int64_t most = 1 + products / PRODUCTS_MIN;
    return threads < most ? threads : (int)most;
}

INLINE void outputs_from(const float *x, const float *divided, int64_t rows, int64_t in, const void *w, int kind,
                         int64_t begin, int64_t end, float *y, int64_t out, Blocks *at) {
    if (divided == NULL)
        few_rows(x, rows, in, w, kind, begin, end, y, out);
    else
        many_rows(divided, rows, in, w, kind, begin, end, y, out, at);
}

/* Outputs from `begin` to `end` of rows, which are `divided` where they are many; rows of y are `out` apart. */
static void linear_part(const float *x, const float *divided, int64_t rows, int64_t in, const void *w, int kind,
                        int64_t begin, int64_t end, float *y, int64_t out, Blocks *at) {
    if (kind == FLOAT32)
        outputs_from(x, divided, rows, in, w, FLOAT32, begin, end, y, out, at);
    else
        outputs_from(x, divided, rows, in, w, FLOAT16, begin, end, y, out, at);
}

/* ------------------------------------------------------------------------------------------------------
 * products in pairs */

/* Of bfloat16, as the instruction of x86 multiplies them that has two pairs of them and adds both products to a
 * float32: by two fused steps, the second of the pair first; what is below the smallest normal number counts as
 * zero, before and after each (`pairs_product` in tests/model/defined_products.py). Lane i sums inputs 2 i and
 * 2 i + 1 of every 32; the last inputs count as filled up with zeros; then the lanes are summed. Weights are read as
 * they lie, rows are rounded to bfloat16. */
#define STEP 32 /* inputs, of all lanes */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIR_ROWS 4    /* whose sums with those of PAIR_OUTPUTS fill the registers, */
#define PAIR_OUTPUTS 6 /* but for what is multiplied */
#elif VECTOR_BYTES == 64
#define PAIR_ROWS 4
#define PAIR_OUTPUTS 4
#define ALONE_OUTPUTS 8 /* of a row that comes alone: steps wait for those before them, of others they do not */
#else
#define PAIR_ROWS 2
#define PAIR_OUTPUTS 2
#define ALONE_OUTPUTS 4
#endif
#define PAIR_TILE (PAIR_ROWS * PAIR_OUTPUTS)
#define NEAR_WEIGHTS (256 << 10) /* bytes that stay in the second cache while rows pass */
#define NEAR_ROWS (1 << 20)      /* bytes of rows that pass at once */

typedef struct {
    const uint16_t *w;
    float *y;
    int64_t rows, in, out;
} Pairs; /* rows of y are `out` apart */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
INLINE vector pairs_added(vector sums, __m512i x, __m512i w) {
    return (vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
}

/* Four rows by `outputs` (a constant), as lanes. Rows lie step by step, four times 32 inputs. Of `portion` (a
 * constant) rows of weights from `ahead` on, which come later, memory is asked for what it has. Where rows are
 * `few` the processor is faster than memory, and would ask for weights itself, in an order in which memory is
 * slow: loading rows again for each output holds it back, which made a pass faster by a third. */
INLINE void add_pairs(int count, int outputs, int portion, int few, const uint16_t *x, const uint16_t *w, int64_t in,
                      const uint16_t *ahead, Lanes *lanes) {
    (void)count;
    vector *sums = &lanes[0].parts[0];
    const int64_t whole = in / STEP * STEP;
#pragma GCC unroll 24
    for (int i = 0; i < PAIR_ROWS * outputs; i++)
        sums[i] = all(0.0f);
    for (int64_t i = 0; i < whole; i += STEP) {
        __m512i rows[PAIR_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < PAIR_ROWS; r++)
            rows[r] = _mm512_loadu_si512(x + PAIR_ROWS * i + STEP * r);
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++) {
            if (o < portion)
                _mm_prefetch((const char *)(ahead + o * in + i), _MM_HINT_T1);
            __m512i weights = _mm512_loadu_si512(w + o * in + i);
            if (few) {
                __asm__ volatile("" ::: "memory");
#pragma GCC unroll 4
                for (int r = 0; r < PAIR_ROWS; r++)
                    rows[r] = _mm512_loadu_si512(x + PAIR_ROWS * i + STEP * r);
            }
#pragma GCC unroll 4
            for (int r = 0; r < PAIR_ROWS; r++)
                sums[r * outputs + o] = pairs_added(sums[r * outputs + o], rows[r], weights);
        }
    }
    if (whole == in)
        return;
    const __mmask32 there = (__mmask32)(((uint64_t)1 << (in - whole)) - 1);
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) {
        __m512i weights = _mm512_maskz_loadu_epi16(there, w + o * in + whole);
#pragma GCC unroll 4
        for (int r = 0; r < PAIR_ROWS; r++)
            sums[r * outputs + o] =
                pairs_added(sums[r * outputs + o], _mm512_loadu_si512(x + PAIR_ROWS * whole + STEP * r), weights);
    }
}
#else

/* x * y + total as the definition has it, whatever the processor's mode: in float64, in which the product is exact,
 * and of which the last digit becomes odd where the sum lost something. */
static float pair_step(float x, float y, float total) {
    const double least = 0x1p-126;
    if (fabsf(x) < (float)least)
        x *= 0.0f;
    if (fabsf(y) < (float)least)
        y *= 0.0f;
    const double product = (double)x * y, sum = product + total, part = sum - product;
    const double lost = (product - (sum - part)) + (total - part);
    double found = sum;
    int64_t bits;
    memcpy(&bits, &sum, 8);
    if (lost != 0 && lost == lost && isfinite(sum) && !(bits & 1)) {
        bits += (lost > 0) == (sum > 0) ? 1 : -1;
        memcpy(&found, &bits, 8);
    }
    return (float)(fabs(found) < least * (1 - 0x1p-25) ? found * 0.0 : found);
}

/* Lane by lane, where a processor has no fused steps, or rounds some number near the smallest otherwise. */
static void add_pairs_exactly(int count, int outputs, const uint16_t *x, const uint16_t *w, int64_t in, Lanes *lanes) {
    for (int r = 0; r < count; r++)
        for (int o = 0; o < outputs; o++) {
            float sums[LANES] = {0};
            for (int64_t i = 0; i < (in + STEP - 1) / STEP * STEP; i++) {
                const int64_t at = i ^ 1; /* the second of each pair first */
                const float weight = at < in ? widened_one(w, o * in + at, BFLOAT16) : 0.0f;
                const float input = widened_one(x, i / STEP * STEP * PAIR_ROWS + STEP * r + at % STEP, BFLOAT16);
                sums[at % STEP / 2] = pair_step(input, weight, sums[at % STEP / 2]);
            }
            memcpy(&lanes[r * outputs + o], sums, sizeof sums);
        }
}

#if defined(__aarch64__) || defined(__FMA__)
#define HAS_STEPS
/* Numbers below the smallest normal one count as zero from here on; returns what held before. */
INLINE uint64_t flush(void) {
#if defined(__aarch64__)
    uint64_t before, none = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(before | 1 << 24));
    __asm__ volatile("msr fpsr, %0" ::"r"(none));
    return before;
#else
    const uint64_t before = _mm_getcsr();
    _mm_setcsr((uint32_t)before | 0x8040);
    return before;
#endif
}

/* As it was before; returns whether a number was flushed that the definition may round up: ARM looks at numbers
 * before they are rounded. */
INLINE int end_flush(uint64_t before) {
#if defined(__aarch64__)
    uint64_t found;
    __asm__ volatile("mrs %0, fpsr" : "=r"(found));
    __asm__ volatile("msr fpcr, %0" ::"r"(before));
    return found >> 3 & 1;
#else
    _mm_setcsr((uint32_t)before);
    return 0;
#endif
}

/* The products of a step of all lanes, of rows and outputs that are constants. */
INLINE void pair_steps(int count, int outputs, const uint16_t *x, const uint16_t *w, int64_t stride, Lanes *sums) {
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
        integers first[PAIR_TILE];
#pragma GCC unroll 8
        for (int o = 0; o < outputs; o++)
            memcpy(&first[o], w + o * stride + p * 2 * WIDTH, sizeof first[o]);
#pragma GCC unroll 4
        for (int r = 0; r < count; r++) {
            integers both;
            memcpy(&both, x + r * STEP + p * 2 * WIDTH, sizeof both);
            const vector even = (vector)(both << 16), odd = (vector)(both & (int32_t)0xffff0000);
#pragma GCC unroll 8
            for (int o = 0; o < outputs; o++) {
                vector *sum = &sums[r * outputs + o].parts[p];
                *sum = fused(odd, (vector)(first[o] & (int32_t)0xffff0000), *sum);
                *sum = fused(even, (vector)(first[o] << 16), *sum);
            }
        }
    }
}
#endif

/* As lanes, `count` rows by `outputs`, constants. Rows lie step by step, PAIR_ROWS times 32 inputs. */
INLINE void add_pairs(int count, int outputs, int portion, int few, const uint16_t *x, const uint16_t *w, int64_t in,
                      const uint16_t *ahead, Lanes *lanes) {
    (void)portion, (void)few, (void)ahead;
#ifdef HAS_STEPS
    const int64_t whole = in / STEP * STEP;
    Lanes sums[PAIR_TILE];
#pragma GCC unroll 16
    for (int i = 0; i < count * outputs; i++)
        for (int p = 0; p < PARTS; p++)
            sums[i].parts[p] = all(0.0f);
    const uint64_t before = flush();
    for (int64_t i = 0; i < whole; i += STEP)
        pair_steps(count, outputs, x + PAIR_ROWS * i, w + i, in, sums);
    if (whole < in) {
        uint16_t rest[PAIR_TILE * STEP] = {0};
        for (int o = 0; o < outputs; o++)
            memcpy(rest + o * STEP, w + o * in + whole, 2 * (in - whole));
        pair_steps(count, outputs, x + PAIR_ROWS * whole, rest, STEP, sums);
    }
    memcpy(lanes, sums, sizeof(Lanes) * count * outputs);
    __asm__ volatile("" ::: "memory"); /* all steps are before this */
    if (!end_flush(before))
        return;
#endif
    add_pairs_exactly(count, outputs, x, w, in, lanes);
}
#endif

/* Of at most `count` rows from `row` on, PAIR_ROWS or one, and some outputs, constants both. */
INLINE void tile_of_pairs(int count, int outputs, int portion, int few, const Pairs *at, const uint16_t *x, int64_t row,
                          int64_t first, int64_t ahead) {
    Lanes lanes[PAIR_TILE];
    float sums[PAIR_TILE + SUMS_ROOM];
    add_pairs(count, outputs, portion, few, x, at->w + first * at->in, at->in, at->w + ahead * at->in, lanes);
    sums_of_lanes(lanes, count * outputs, sums);
    for (int r = 0; r < count && r < at->rows - row; r++)
        memcpy(at->y + (row + r) * at->out + first, sums + r * outputs, sizeof(float) * outputs);
}

/* Outputs from `begin` to `end` of all rows. Blocks of weights stay near while rows pass by PAIR_ROWS, and
 * meanwhile the next block is fetched, portion by portion. */
static void outputs_of_pairs(const Pairs *at, const uint16_t *x, int64_t begin, int64_t end) {
#ifdef ALONE_OUTPUTS
    for (; at->rows == 1 && begin + ALONE_OUTPUTS <= end; begin += ALONE_OUTPUTS)
        tile_of_pairs(1, ALONE_OUTPUTS, 0, 0, at, x, 0, begin, begin);
#endif
    const int64_t steps = (at->in + STEP - 1) / STEP, row_bytes = 2 * STEP * steps;
    const int64_t groups = 1 + at->rows * row_bytes / NEAR_ROWS, all_tiles = (at->rows + PAIR_ROWS - 1) / PAIR_ROWS;
    const int64_t group = (all_tiles + groups - 1) / groups * PAIR_ROWS;
    for (int64_t from = 0; from < at->rows; from += group) {
        int64_t to = from + group < at->rows ? from + group : at->rows;
        int64_t tiles = (to - from + PAIR_ROWS - 1) / PAIR_ROWS;
        int portion = tiles == 1 ? 6 : tiles == 2 ? 3 : tiles < 6 ? 2 : 1;
        int64_t near = tiles < 6 ? 1 : NEAR_WEIGHTS / row_bytes / PAIR_OUTPUTS;
        int64_t block = PAIR_OUTPUTS * (near > 1 ? near : 1);
        for (int64_t o = begin; o < end; o += block) {
            int64_t block_end = o + block < end ? o + block : end, ahead = block_end;
            int64_t ahead_end = block_end + block < end ? block_end + block : end;
            for (int64_t row = from; row < to; row += PAIR_ROWS) {
                const uint16_t *rows = x + row * STEP * steps;
                int64_t first = o;
                for (; first + PAIR_OUTPUTS <= block_end; first += PAIR_OUTPUTS) {
                    int some = ahead + portion <= ahead_end ? portion : 0;
#define TILE(some, few) tile_of_pairs(PAIR_ROWS, PAIR_OUTPUTS, some, few, at, rows, row, first, ahead)
                    if (tiles == 1 && some)
                        TILE(6, 1);
                    else if (some == 3)
                        TILE(3, 0);
                    else if (some == 2)
                        TILE(2, 0);
                    else if (some == 1)
                        TILE(1, 0);
                    else
                        TILE(0, 0);
#undef TILE
                    ahead += some;
                }
                for (; first < block_end; first++)
                    tile_of_pairs(PAIR_ROWS, 1, 0, 0, at, rows, row, first, first);
            }
        }
    }
}

/* A row in bfloat16, or zeros, to where `add_pairs` reads row number `row`. */
INLINE void pair_row(const float *x, int64_t row, int64_t in, uint16_t *to) {
    const int64_t steps = (in + STEP - 1) / STEP;
    to += (row / PAIR_ROWS * steps * PAIR_ROWS + row % PAIR_ROWS) * STEP;
    for (int64_t step = 0; step < steps; step++, to += PAIR_ROWS * STEP) {
        const int64_t left = in - step * STEP;
        memset(to, 0, 2 * STEP);
        if (x != NULL)
            narrow_all(x + step * STEP, left < STEP ? left : STEP, to, 0, BFLOAT16);
    }
}

/* ------------------------------------------------------------------------------------------------------
 * packed linear layers */

/* Packed weights lie in panels of sixteen outputs (`packed.py` says how). Levels of a group of 32 inputs are
 * eight vectors, of which vector v has inputs 4 v to 4 v + 3 of each output, as processors multiply bytes. Rows
 * are rounded to whole numbers from -127 to 127, group by group. A group's products and their sum are integers,
 * in which nothing is lost; what follows is in float32, number by number and group after group. So all
 * processors compute the same bits, each with what instructions it has. */
#define PANEL 16
#define GROUP 32
#define LEVEL_MOST 127.0f
#define PEAK_LEAST 1e-30f /* below, a group counts as zeros */
#define FINER 7 /* of a row that is rounded twice the second step is so many halvings smaller */

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4, FORMS };

/* What is true of a form; `form` is a constant wherever these are called. */
INLINE int bits_of(int form) {
    return form == Q8_0 ? 8 : form == Q6_K ? 6 : form == Q5_0 || form == Q5_1 || form == Q5_K ? 5 : 4;
}
INLINE int groups_in_unit(int form) { return form >= Q4_K && form <= Q6_K ? 8 : 1; }
INLINE int has_halves(int form) { return form == Q6_K; }
INLINE int has_minimum(int form) { return form == Q4_1 || form == Q5_1 || form == Q4_K || form == Q5_K; }
INLINE int has_table(int form) { return form == IQ4_NL || form == MXFP4; } /* levels stand for other numbers */
INLINE int is_signed(int form) { return form == Q8_0 || has_table(form); }
INLINE int level_bytes(int form) { return PANEL * GROUP * bits_of(form) / 8; }
INLINE int scale_bytes(int form) {
    return groups_in_unit(form) == 1 ? 0 : has_halves(form) ? 2 * PANEL : PANEL * 3 / 2;
}
INLINE int unit_bytes(int form) {
    const int ends = form == MXFP4 ? PANEL : 2 * PANEL * (1 + has_minimum(form));
    return groups_in_unit(form) * (level_bytes(form) + scale_bytes(form)) + ends;
}

static const int8_t LEVELS_4NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t LEVELS_FLOAT[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
INLINE const int8_t *table_of(int form) { return form == MXFP4 ? LEVELS_FLOAT : LEVELS_4NL; }

/* SUB outputs at once: `Levels` are their weights of four inputs, `Sums` their integers, `Reals` float32. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define SUB 16
#define PACKED_ROWS 8 /* rows that share what is unpacked */
#define SIGN 128      /* what is added to levels with a sign, as products want the one side without */
#elif defined(__AVX2__) && defined(__F16C__)
#define SUB 8
#define PACKED_ROWS 4
#define SIGN 0
#elif defined(__aarch64__)
#define SUB 4
#define PACKED_ROWS 8
#define SIGN 0
#else
#define SUB 4
#define PACKED_ROWS 4
#define SIGN 0
#endif
typedef uint8_t Levels __attribute__((vector_size(4 * SUB)));
typedef int32_t Sums __attribute__((vector_size(4 * SUB)));
typedef float Reals __attribute__((vector_size(4 * SUB)));
typedef uint8_t Bytes __attribute__((vector_size(16))); /* of which the first SUB are used */
typedef uint64_t Words __attribute__((vector_size(16)));

INLINE Levels levels_at(const uint8_t *from) {
    Levels found;
    memcpy(&found, from, sizeof found);
#if SUB == 16
    __asm__("" : "+v"(found)); /* loaded once, not for each use: vectors are split between two lines of a cache */
#endif
    return found;
}

INLINE int32_t four_inputs(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return four;
}

INLINE Reals all_reals(float value) { return value - (Reals){0}; }

/* What levels of four bits stand for, SIGN added. */
INLINE Levels looked_up(int form, Levels at) {
#if SUB == 16
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table_of(form)));
    return (Levels)_mm512_shuffle_epi8(table, (__m512i)at) ^ SIGN;
#elif SUB == 8
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table_of(form)));
    return (Levels)_mm256_shuffle_epi8(table, (__m256i)at);
#elif defined(__aarch64__)
    return (Levels)vqtbl1q_s8(vld1q_s8(table_of(form)), (uint8x16_t)at);
#else
    for (int i = 0; i < 4 * SUB; i++)
        at[i] = (uint8_t)table_of(form)[at[i]];
    return at;
#endif
}

/* The eight vectors of a group, of SUB outputs from `sub` on. */
INLINE void unpack(int form, const uint8_t *from, int64_t sub, Levels *weights) {
    from += 4 * sub;
    if (form == Q8_0) {
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++)
            weights[v] = levels_at(from + 64 * v) ^ (uint8_t)(SIGN ^ 128);
        return;
    }
#pragma GCC unroll 8
    for (int v = 0; v < 4; v++) {
        Levels both = levels_at(from + 64 * v);
        weights[v] = both & 15;
        weights[v + 4] = both >> 4;
    }
    if (has_table(form))
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++)
            weights[v] = looked_up(form, weights[v]);
    if (bits_of(form) == 5) {
        Levels above = levels_at(from + 256);
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++)
            weights[v] |= (v < 4 ? above << (4 - v) : above >> (v - 4)) & 16;
    }
    if (bits_of(form) == 6) {
        Levels even = levels_at(from + 256), odd = levels_at(from + 320);
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            Levels above = v & 1 ? odd : even;
            int place = v / 2 * 2;
            weights[v] |= (place < 4 ? above << (4 - place) : above >> (place - 4)) & 48;
        }
    }
}

INLINE Sums all_sums(int32_t value) { return value - (Sums){0}; }

/* `start` and the sums of the products of `count` vectors (a constant, 4 or 8) with four inputs each. Levels with a
 * sign are int8, or have SIGN added. */
INLINE Sums products_of(int form, const Levels *weights, const int8_t *x, int count, Sums start) {
#if SUB == 16
    __m512i even = (__m512i)start, odd = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int v = 0; v < count; v += 2) {
        even = _mm512_dpbusd_epi32(even, (__m512i)weights[v], _mm512_set1_epi32(four_inputs(x + 4 * v)));
        odd = _mm512_dpbusd_epi32(odd, (__m512i)weights[v + 1], _mm512_set1_epi32(four_inputs(x + 4 * v + 4)));
    }
    return (Sums)even + (Sums)odd;
#elif SUB == 8
    int portion = is_signed(form) ? 1 : bits_of(form) == 6 ? 2 : bits_of(form) == 5 ? 4 : 8;
    __m256i ones = _mm256_set1_epi16(1), sums = (__m256i)start, pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) {
        __m256i inputs = _mm256_set1_epi32(four_inputs(x + 4 * v)), levels = (__m256i)weights[v];
        if (is_signed(form)) { /* 128 * 127 + 128 * 127 fits 16 bits */
            inputs = _mm256_sign_epi8(inputs, levels);
            levels = _mm256_abs_epi8(levels);
        }
        __m256i products = _mm256_maddubs_epi16(levels, inputs);
        pairs = v % portion ? _mm256_add_epi16(pairs, products) : products;
        if (v % portion == portion - 1 || v == count - 1)
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
    }
    return (Sums)sums;
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t even = (int32x4_t)start, odd = vdupq_n_s32(0);
#pragma GCC unroll 2
    for (int v = 0; v < count; v += 4) {
        int8x16_t inputs = vld1q_s8(x + 4 * v);
        even = vdotq_laneq_s32(even, (int8x16_t)weights[v], inputs, 0);
        odd = vdotq_laneq_s32(odd, (int8x16_t)weights[v + 1], inputs, 1);
        even = vdotq_laneq_s32(even, (int8x16_t)weights[v + 2], inputs, 2);
        odd = vdotq_laneq_s32(odd, (int8x16_t)weights[v + 3], inputs, 3);
    }
    return (Sums)vaddq_s32(even, odd);
#elif defined(__aarch64__)
    int portion = is_signed(form) ? 2 : bits_of(form) == 6 ? 4 : 8;
    int32x4_t first = vdupq_n_s32(0), second = first;
    int16x8_t low = vdupq_n_s16(0), high = low;
#pragma GCC unroll 8
    for (int v = 0; v < count; v++) {
        int8x16_t inputs = vreinterpretq_s8_s32(vdupq_n_s32(four_inputs(x + 4 * v))), levels = (int8x16_t)weights[v];
        if (v % portion) {
            low = vmlal_s8(low, vget_low_s8(levels), vget_low_s8(inputs));
            high = vmlal_high_s8(high, levels, inputs);
        } else {
            low = vmull_s8(vget_low_s8(levels), vget_low_s8(inputs));
            high = vmull_high_s8(levels, inputs);
        }
        if (v % portion == portion - 1 || v == count - 1) {
            first = vpadalq_s16(first, low);
            second = vpadalq_s16(second, high);
        }
    }
    return (Sums)vpaddq_s32(first, second) + start;
#else
    Sums sums = start;
    for (int v = 0; v < count; v++)
        for (int i = 0; i < 4 * SUB; i++)
            sums[i / 4] += (is_signed(form) ? (int8_t)weights[v][i] : weights[v][i]) * x[4 * v + i % 4];
    return sums;
#endif
}

INLINE Reals half_reals(const uint8_t *from) {
#if SUB == 16
    return (Reals)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif SUB == 8
    return (Reals)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (Reals)vcvt_f32_f16(vld1_f16((const __fp16 *)from));
#else
    Reals found;
    for (int i = 0; i < SUB; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, 2);
        found[i] = from_half(bits);
    }
    return found;
#endif
}

INLINE Bytes bytes_at(const uint8_t *from) {
#if SUB == 16
    Bytes found;
    memcpy(&found, from, sizeof found);
    return found;
#else
    uint64_t word = 0;
    memcpy(&word, from, SUB);
    return (Bytes)(Words){word, 0};
#endif
}

/* Two bits above the scales, and two above the minimums, of SUB outputs from `sub` on. */
INLINE Bytes above_at(const uint8_t *from, int64_t sub) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
#if SUB == 16
    (void)sub;
    return (Bytes)(Words){word, word >> 4};
#else
    return (Bytes)(Words){word >> (sub % 8 * 8 + sub / 8 * 4), 0};
#endif
}

INLINE Reals from_bytes(Bytes bytes) {
#if SUB == 16
    return (Reals)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#elif SUB == 8
    return (Reals)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32((__m128i)bytes));
#elif defined(__aarch64__)
    return (Reals)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vget_low_u8((uint8x16_t)bytes)))));
#else
    return (Reals){bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

/* Of bytes with a sign. */
INLINE Reals from_signed_bytes(Bytes bytes) { return from_bytes(bytes ^ 128) - all_reals(128); }

/* 2^(byte - 128); the two smallest are no normal numbers. */
INLINE Reals from_exponents(Bytes bytes) {
    Sums at = __builtin_convertvector(from_bytes(bytes), Sums), is_normal = at > 1;
    return (Reals)((is_normal & (at - 1) << 23) | (~is_normal & ((at & 1) + 1) << 21));
}

/* Of SUB outputs from `sub` on: a group's scales, of both halves where it has two, and its minimums. */
INLINE void scales_of(int form, const uint8_t *from, const uint8_t *ends, int64_t sub, Reals *scales,
                      Reals *minimums) {
    scales[0] = form == MXFP4 ? from_exponents(bytes_at(ends + sub)) : half_reals(ends + 2 * sub);
    if (has_minimum(form))
        *minimums = half_reals(ends + 2 * PANEL + 2 * sub);
    if (has_halves(form)) {
        scales[1] = scales[0] * from_signed_bytes(bytes_at(from + PANEL + sub));
        scales[0] *= from_signed_bytes(bytes_at(from + sub));
    } else if (groups_in_unit(form) > 1) {
        Bytes low = bytes_at(from + sub), above = above_at(from + PANEL, sub);
        scales[0] *= from_bytes((low & 15) | (above & 3) << 4);
        *minimums *= from_bytes(low >> 4 | (above & 12) << 2);
    }
}

/* A group of a row that was rounded: levels, the step between them, and that step times their sum. With
 * `starts` the sums of products begin, of each half where these have scales of their own: they take the offset
 * of the weights' levels away. */
typedef struct {
    int8_t levels[GROUP];
    int32_t starts[2];
    float step, moment;
} Rounded; /* of a row that is rounded twice two, of which the second has the levels of what the first leaves */

/* Some rows (a constant, at most PACKED_ROWS) of so many groups times outputs of a panel, from output `sub` of it
 * on, of which there are `left`: SUB outputs, or `subs` (a constant) times so many. */
INLINE void packed_tile(int form, int times, int rows, int subs, const uint8_t *panel, const Rounded *x, int64_t groups,
                        int64_t sub, int64_t left, float *y, int64_t out) {
    Reals totals[PACKED_ROWS];
#pragma GCC unroll 8
    for (int t = 0; t < rows * subs; t++)
        totals[t] = all_reals(0);
    const int per_unit = groups_in_unit(form), size = level_bytes(form) + scale_bytes(form);
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *unit = panel + g / per_unit * unit_bytes(form), *from = unit + g % per_unit * size;
#pragma GCC unroll 4
        for (int part = 0; part < subs; part++) {
            Levels weights[8];
            Reals scales[2] = {all_reals(0), all_reals(0)}, minimums = all_reals(0);
            unpack(form, from, sub + part * SUB, weights);
            scales_of(form, from + level_bytes(form), unit + per_unit * size, sub + part * SUB, scales, &minimums);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const Rounded *at = x + (g * rows + r) * times;
                Reals step = all_reals(at->step), *total = totals + r * subs + part;
                if (has_halves(form)) {
                    Sums low = products_of(form, weights, at->levels, 4, all_sums(at->starts[0])),
                         high = products_of(form, weights + 4, at->levels + GROUP / 2, 4, all_sums(at->starts[1]));
                    if (times == 2) {
                        low = products_of(form, weights, at[1].levels, 4, (low << FINER) + all_sums(at[1].starts[0]));
                        high = products_of(form, weights + 4, at[1].levels + GROUP / 2, 4,
                                           (high << FINER) + all_sums(at[1].starts[1]));
                    }
                    *total += (scales[0] * step) * __builtin_convertvector(low, Reals);
                    *total += (scales[1] * step) * __builtin_convertvector(high, Reals);
                } else {
                    Sums sums = products_of(form, weights, at->levels, 8, all_sums(at->starts[0]));
                    if (times == 2)
                        sums = products_of(form, weights, at[1].levels, 8, (sums << FINER) + all_sums(at[1].starts[0]));
                    *total += (scales[0] * step) * __builtin_convertvector(sums, Reals);
                }
                if (has_minimum(form))
                    *total -= minimums * all_reals(at->moment);
            }
        }
    }
    int64_t count = left < subs * SUB ? left : subs * SUB;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        memcpy(y + r * out, &totals[r * subs], sizeof(float) * count);
}

/* What is taken from a level of the form: here the levels with a sign have SIGN more. */
INLINE int offset_of(int form) {
    return form == Q4_0 ? 8 : form == Q5_0 ? 16 : form == Q6_K ? 32 : is_signed(form) ? SIGN : 0;
}

/* Of so many rows, which go in portions of PACKED_ROWS and then of less, the first row of the portion that row
 * `r` is in, and how many rows that has. */
INLINE int64_t portion_of(int64_t r, int64_t rows, int *count) {
    int64_t first = r / PACKED_ROWS * PACKED_ROWS;
    for (*count = PACKED_ROWS; first + *count > rows || r >= first + *count; *count /= 2)
        first += first + *count <= rows ? *count : 0;
    return first;
}

typedef int32_t __attribute__((may_alias)) Bits;

/* Rounds up to GROUP numbers to levels, 0 for those that are not there; returns the step between levels. `finer`,
 * if given, gets levels of what is left, whose step is smaller by FINER halvings; `sums`, if given, those of levels
 * and of finer ones, half by half. A group that has what is no number, or is infinite, gets a step that is no
 * number. */
INLINE float round_group(const float *x, int64_t count, int8_t *levels, int8_t *finer, int32_t sums[2][2]) {
    float filled[GROUP], peak;
    const float *numbers = x;
    if (count < GROUP) {
        memset(filled, 0, sizeof filled);
        numbers = memcpy(filled, x, sizeof(float) * count);
    }
    const Bits *bits = (const Bits *)numbers;
    int32_t most = 0;
    for (int i = 0; i < GROUP; i++) /* sizes are ordered as their bits are, and what is no number above all */
        most = (bits[i] & 0x7fffffff) > most ? bits[i] & 0x7fffffff : most;
    memcpy(&peak, &most, 4);
    int is_number = peak > PEAK_LEAST && peak < INFINITY;
    float factor = is_number ? LEVEL_MOST / peak : 0.0f;
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0, finer_sum = 0;
        for (int i = half * (GROUP / 2); i < (half + 1) * (GROUP / 2); i++) { /* to even, as `exponential` does */
            float number = is_number ? numbers[i] * factor : 0.0f, level = (number + 12582912.0f) - 12582912.0f,
                  left = ((number - level) * (1 << FINER) + 12582912.0f) - 12582912.0f;
            levels[i] = (int8_t)level;
            sum += (int32_t)level;
            if (finer != NULL) {
                finer[i] = (int8_t)left;
                finer_sum += (int32_t)left;
            }
        }
        if (sums != NULL) {
            sums[0][half] = sum;
            sums[1][half] = finer_sum;
        }
    }
    return is_number ? peak / LEVEL_MOST : peak <= PEAK_LEAST ? 0.0f : NAN;
}

/* Rounds a row, group by group, each `stride` after the one before; twice, if `times` is 2. */
INLINE void round_groups(const float *x, int64_t in, int64_t groups, int32_t offset, int has_halves, int times,
                         Rounded *to, int stride) {
    for (int64_t g = 0; g < groups; g++, to += stride) {
        const int64_t count = in - g * GROUP < GROUP ? in - g * GROUP : GROUP;
        int32_t sums[2][2], whole = 0;
        const float step = round_group(x + g * GROUP, count, to->levels, times == 2 ? to[1].levels : NULL, sums);
        for (int t = 0; t < times; t++) {
            const int32_t sum = sums[t][0] + sums[t][1];
            to[t].starts[0] = -offset * (has_halves ? sums[t][0] : sum);
            to[t].starts[1] = -offset * sums[t][1];
            whole = whole * (1 << FINER) + sum;
        }
        to->step = times == 2 ? step * (1.0f / (1 << FINER)) : step;
        to->moment = to->step * (float)whole;
    }
}

typedef struct {
    const uint8_t *panels;
    int64_t rows, in, out;
    int times; /* that rows are rounded */
} Packed;

/* One panel with all rows, to `found`, whose rows are `between` apart. */
INLINE void panel_product(int form, int times, const Packed *a, const Rounded *x, int64_t p, float *found,
                          int64_t between) {
    int64_t groups = (a->in + GROUP - 1) / GROUP;
    const uint8_t *panel = a->panels + p * (groups / groups_in_unit(form) * unit_bytes(form));
    const int64_t outputs = a->out - p * PANEL < PANEL ? a->out - p * PANEL : PANEL;
    int count;
    for (int64_t r = 0; r < a->rows; r += count) {
        portion_of(r, a->rows, &count);
        const Rounded *from = x + r * groups * times;
        float *y = found + r * between + p * PANEL;
        if (count == 1) {
            packed_tile(form, times, 1, PANEL / SUB, panel, from, groups, 0, outputs, y, between);
            continue;
        }
        for (int64_t sub = 0; sub < outputs; sub += SUB)
            if (count == PACKED_ROWS)
                packed_tile(form, times, PACKED_ROWS, 1, panel, from, groups, sub, outputs - sub, y + sub, between);
            else if (count == 4)
                packed_tile(form, times, 4, 1, panel, from, groups, sub, outputs - sub, y + sub, between);
            else
                packed_tile(form, times, 2, 1, panel, from, groups, sub, outputs - sub, y + sub, between);
    }
}

/* A function for each form, in which that is a constant: what OpenMP divides is compiled by itself, where it
 * would be none. */
#define FORM(form)                                                                                           \
    static void panel_##form(const Packed *a, const Rounded *x, int64_t p, float *found, int64_t between) {  \
        if (a->times == 2)                                                                                   \
            panel_product(form, 2, a, x, p, found, between);                                                 \
        else                                                                                                 \
            panel_product(form, 1, a, x, p, found, between);                                                 \
    }
FORM(Q4_0) FORM(Q4_1) FORM(Q5_0) FORM(Q5_1) FORM(Q8_0) FORM(Q4_K) FORM(Q5_K) FORM(Q6_K) FORM(IQ4_NL)
    FORM(MXFP4)
#undef FORM
static void (*const PANEL_PRODUCTS[FORMS])(const Packed *, const Rounded *, int64_t, float *, int64_t) = {
    panel_Q4_0, panel_Q4_1, panel_Q5_0, panel_Q5_1,   panel_Q8_0,
    panel_Q4_K, panel_Q5_K, panel_Q6_K, panel_IQ4_NL, panel_MXFP4};

/* Of output `o` of a panel the level of input `i` of a group, in which a level with a sign has one. */
INLINE int level_of(int form, const uint8_t *from, int o, int i) {
    int v = i / 4, at = 4 * o + i % 4;
    if (form == Q8_0)
        return from[64 * v + at] - 128;
    int low = v < 4 ? from[64 * v + at] & 15 : from[64 * (v - 4) + at] >> 4;
    if (has_table(form))
        return table_of(form)[low];
    if (bits_of(form) == 5)
        low |= (from[256 + at] >> v & 1) << 4;
    if (bits_of(form) == 6)
        low |= (from[256 + 64 * (v % 2) + at] >> v / 2 * 2 & 3) << 4;
    return low - (form == Q4_0 ? 8 : form == Q5_0 ? 16 : form == Q6_K ? 32 : 0);
}

INLINE void packed_row(int form, const uint8_t *panel, int64_t in, int o, float *y) {
    const int per_unit = groups_in_unit(form), size = level_bytes(form) + scale_bytes(form), sub = o / SUB * SUB;
    for (int64_t g = 0; g < in / GROUP; g++) {
        const uint8_t *unit = panel + g / per_unit * unit_bytes(form), *from = unit + g % per_unit * size;
        Reals scales[2] = {all_reals(0), all_reals(0)}, minimums = all_reals(0);
        scales_of(form, from + level_bytes(form), unit + per_unit * size, sub, scales, &minimums);
        for (int i = 0; i < GROUP; i++) {
            float scale = scales[has_halves(form) ? i / (GROUP / 2) : 0][o - sub];
            float number = scale * (float)level_of(form, from, o, i);
            y[g * GROUP + i] = has_minimum(form) ? number - minimums[o - sub] : number;
        }
    }
}

/* y [count, in]: rows of a packed matrix as numbers. */
void flowspec_packed_rows(const uint8_t *panels, int form, int64_t in, const int64_t *ids, int64_t count,
                          float *y) {
    for (int64_t r = 0; r < count; r++) {
        const int o = (int)(ids[r] % PANEL);
        float *to = y + r * in;
#define FORM(form)                                                                                           \
    case form:                                                                                               \
        packed_row(form, panels + ids[r] / PANEL * (in / (GROUP * groups_in_unit(form))) * unit_bytes(form), \
                   in, o, to);                                                                               \
        break;
        switch (form) { FORM(Q4_0) FORM(Q4_1) FORM(Q5_0) FORM(Q5_1) FORM(Q8_0) FORM(Q4_K) FORM(Q5_K) FORM(Q6_K)
                        FORM(IQ4_NL) FORM(MXFP4) }
#undef FORM
    }
}

/* -------------------------------------------------------------------------------------------- functions of
 * one number */

INLINE vector chosen(integers where, vector yes, vector no) {
    return (vector)(((integers)yes & where) | ((integers)no & ~where));
}

/* Of two numbers the second where they are equal or one is none, as instructions of x86 have it. */
INLINE vector least(vector a, vector b) {
#if defined(__AVX512F__)
    return (vector)_mm512_min_ps((__m512)a, (__m512)b);
#elif VECTOR_BYTES == 32
    return (vector)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return chosen(a < b, a, b);
#endif
}

INLINE vector greatest(vector a, vector b) {
#if defined(__AVX512F__)
    return (vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif VECTOR_BYTES == 32
    return (vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return chosen(a > b, a, b);
#endif
}

/* e^x: 0 below EXP_LEAST, as for EXP_MOST above it. What is no number stays so. */
#define EXP_LEAST -86.0f
#define EXP_MOST 88.0f
#define TOGETHER 4 /* vectors whose steps alternate, for each step waits for the one before */
#define EACH(i, count) _Pragma("GCC unroll 4") for (int i = 0; i < (count); i++)
INLINE void exponentials(vector *x, int count) { /* a constant, at most TOGETHER */
    vector shifted[TOGETHER], rest[TOGETHER], sum[TOGETHER];
    EACH(i, count) shifted[i] = greatest(least(x[i], all(EXP_MOST)), all(EXP_LEAST));
    EACH(i, count) rest[i] = shifted[i];
    EACH(i, count) shifted[i] = shifted[i] * all(1.44269504088896341f) + all(12582912.0f);
    EACH(i, count) {
        vector whole = shifted[i] - all(12582912.0f);
        rest[i] = (rest[i] - whole * all(0.693359375f)) - whole * all(-2.12194440e-4f);
    }
    EACH(i, count) sum[i] = rest[i] * all(1.9875691500e-4f) + all(1.3981999507e-3f);
    EACH(i, count) sum[i] = sum[i] * rest[i] + all(8.3334519073e-3f);
    EACH(i, count) sum[i] = sum[i] * rest[i] + all(4.1665795894e-2f);
    EACH(i, count) sum[i] = sum[i] * rest[i] + all(1.6666665459e-1f);
    EACH(i, count) sum[i] = sum[i] * rest[i] + all(5.0000001201e-1f);
    EACH(i, count) sum[i] = sum[i] * (rest[i] * rest[i]) + rest[i] + all(1.0f);
    EACH(i, count) {
        integers power = ((integers)shifted[i] - (integers)all(12582912.0f)) << 23;
        sum[i] = (vector)((integers)sum[i] + power);
    }
    EACH(i, count) sum[i] = chosen(x[i] < all(EXP_LEAST), all(0.0f), sum[i]);
    EACH(i, count) x[i] = chosen(x[i] == x[i], sum[i], x[i]);
}

INLINE vector exponential(vector x) {
    exponentials(&x, 1);
    return x;
}

INLINE void logistics(vector *x, int count) {
    EACH(i, count) x[i] = -x[i];
    exponentials(x, count);
    EACH(i, count) x[i] = all(1.0f) / (all(1.0f) + x[i]);
}

INLINE void hyperbolics(vector *x, int count) {
    vector sizes[TOGETHER];
    EACH(i, count) {
        vector size = (vector)((integers)x[i] & 0x7fffffff);
        sizes[i] = size + size;
    }
    exponentials(sizes, count);
    EACH(i, count) {
        vector found = all(1.0f) - all(2.0f) * (all(1.0f) / (all(1.0f) + sizes[i]));
        x[i] = (vector)((integers)found | ((integers)x[i] & (integers)all(-0.0f)));
    }
}

INLINE vector hyperbolic(vector x) {
    hyperbolics(&x, 1);
    return x;
}

enum { SILU, GELU_TANH, TANH, SIGMOID, RELU };

INLINE void functions_of(vector *x, int count, int function) {
    vector inner[TOGETHER];
    if (function == TANH)
        hyperbolics(x, count);
    else if (function == SIGMOID)
        logistics(x, count);
    else if (function == RELU) {
        EACH(i, count) x[i] = chosen(x[i] < all(0.0f), all(0.0f), x[i]);
    } else if (function == SILU) {
        EACH(i, count) inner[i] = x[i];
        logistics(inner, count);
        EACH(i, count) x[i] = x[i] * inner[i];
    } else {
        EACH(i, count) inner[i] = (x[i] + all(0.044715f) * (x[i] * x[i] * x[i])) * all(0.79788456080286536f);
        hyperbolics(inner, count);
        EACH(i, count) x[i] = all(0.5f) * x[i] * (all(1.0f) + inner[i]);
    }
}

/* Without `times` the function's results; else these times them. */
INLINE void function_of_all(const float *x, int64_t count, int function, const float *times, float *y) {
    int64_t i = 0;
    for (; i + TOGETHER * WIDTH <= count; i += TOGETHER * WIDTH) {
        vector found[TOGETHER];
        EACH(v, TOGETHER) found[v] = load(x + i + v * WIDTH);
        functions_of(found, TOGETHER, function);
        if (times)
            EACH(v, TOGETHER) found[v] = found[v] * load(times + i + v * WIDTH);
        EACH(v, TOGETHER) store(y + i + v * WIDTH, found[v]);
    }
    for (; i < count; i += WIDTH) {
        const int64_t some = count - i < WIDTH ? count - i : WIDTH;
        float rest[WIDTH] = {0}, by[WIDTH] = {0};
        memcpy(rest, x + i, sizeof(float) * some);
        vector found = load(rest);
        functions_of(&found, 1, function);
        if (times) {
            memcpy(by, times + i, sizeof(float) * some);
            found = found * load(by);
        }
        store(rest, found);
        memcpy(y + i, rest, sizeof(float) * some);
    }
}

/* y [count] from x [count] and, if given, times [count]. */
void flowspec_function(const float *x, int64_t count, int function, const float *times, float *y) {
    if (function == SILU)
        function_of_all(x, count, SILU, times, y);
    else if (function == GELU_TANH)
        function_of_all(x, count, GELU_TANH, times, y);
    else if (function == TANH)
        function_of_all(x, count, TANH, times, y);
    else if (function == SIGMOID)
        function_of_all(x, count, SIGMOID, times, y);
    else
        function_of_all(x, count, RELU, times, y);
}

/* -------------------------------------------------------------------------------------------------------------
 * norms */

enum { BY_WEIGHTS, BY_ONE_PLUS_WEIGHTS };

/* A row over the root of its mean square, times weights. `squares` has `room` numbers, the next power of two above
 * a row's; `share` is 1 / width. */
INLINE void normalise(const float *x, const float *weights, int64_t width, float share, float eps, int how, float *y,
                      int64_t room, float *squares) {
    for (int64_t i = 0; i < width; i++)
        squares[i] = x[i] * x[i];
    memset(squares + width, 0, sizeof(float) * (room - width));
    for (int64_t half = room / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++)
            squares[i] += squares[i + half];
    const float factor = 1.0f / sqrtf(squares[0] * share + eps);
    if (how == BY_ONE_PLUS_WEIGHTS)
        for (int64_t i = 0; i < width; i++)
            y[i] = x[i] * factor * (1.0f + weights[i]);
    else
        for (int64_t i = 0; i < width; i++)
            y[i] = x[i] * factor * weights[i];
}

/* The numbers of a row, and as many zeros as make it a power of two. */
INLINE int64_t norm_room(int64_t width) {
    int64_t room = WIDTH;
    while (room < width)
        room *= 2;
    return room;
}

/* ---------------------------------------------------------------------------------------------------------
 * products with small matrices, such as a router's, and shares, summed in halves */

/* Half of the power of two that numbers are filled up to; 0 for one alone. */
INLINE int64_t half_room(int64_t count) {
    int64_t half = 0;
    while (2 * half < count && count > 1)
        half = half ? 2 * half : 1;
    return half;
}

/* The sum of so many terms, a power of two: the two halves, then the halves of that, ... */
INLINE float folded(float *terms, int64_t count) {
    for (count /= 2; count; count /= 2)
        for (int64_t i = 0; i < count; i++)
            terms[i] += terms[i + count];
    return terms[0];
}

/* The terms are filled up to a power of two, twice `half`, for so many of which `terms` has room. */
INLINE float halves_product(const float *x, const float *w, int64_t in, int64_t half, float *terms) {
    if (half == 0)
        return x[0] * w[0];
    for (int64_t i = 0; i < in - half; i++)
        terms[i] = x[i] * w[i] + x[i + half] * w[i + half];
    for (int64_t i = in - half; i < half; i++)
        terms[i] = x[i] * w[i] + 0.0f; /* which is another zero than -0 */
    return folded(terms, half);
}

/* The sum of numbers, as of the terms there. */
INLINE float halves_sum(const float *numbers, int64_t count, int64_t half, float *terms) {
    if (half == 0)
        return numbers[0];
    for (int64_t i = 0; i < count - half; i++)
        terms[i] = numbers[i] + numbers[i + half];
    for (int64_t i = count - half; i < half; i++)
        terms[i] = numbers[i] + 0.0f;
    return folded(terms, half);
}

/* ---------------------------------------------------------------------------------------------------------
 * position embeddings */

/* Half of pi: 33 bits, and the next 53. */
static const double QUARTER_HIGH = 1.57079632673412561417e00, QUARTER_LOW = 6.07710050650619224932e-11;
/* fdlibm's sine and cosine between -pi/4 and pi/4, the highest power first. */
static const double SINE_TERMS[] = {1.58969099521155010221e-10,  -2.50507602534068634195e-08,
                                    2.75573137070700676789e-06,  -1.98412698298579493134e-04,
                                    8.33333333332248946124e-03,  -1.66666666666666324348e-01};
static const double COSINE_TERMS[] = {-1.13596475577881948265e-11, 2.08757232129817482790e-09,
                                      -2.75573143513906633035e-07, 2.48015872894767294178e-05,
                                      -1.38888888888741095749e-03, 4.16666666666666019037e-02};

static void cosine_and_sine(float x, float *cosine_of, float *sine_of) {
    const double quarters = rint(x * 0.63661977236758134308);
    const double rest = x - quarters * QUARTER_HIGH - quarters * QUARTER_LOW, square = rest * rest;
    double sine = SINE_TERMS[0], cosine = COSINE_TERMS[0];
    for (int term = 1; term < 6; term++) {
        sine = sine * square + SINE_TERMS[term];
        cosine = cosine * square + COSINE_TERMS[term];
    }
    sine = rest + rest * square * sine;
    cosine = (1.0 - 0.5 * square) + square * square * cosine;
    const int place = (int64_t)quarters & 3;
    const double first = place & 1 ? sine : cosine, second = place & 1 ? cosine : sine;
    *cosine_of = (float)(place == 1 || place == 2 ? -first : first);
    *sine_of = (float)(place >= 2 ? -second : second);
}

/* cosine and sine [rows, 2 * count], each twice, from positions [rows] and frequencies [count]. */
void flowspec_angles(const int64_t *positions, int64_t rows, const float *frequencies, int64_t count, float scale,
                     float *cosine, float *sine) {
    for (int64_t at = 0; at < rows * count; at++) {
        const int64_t r = at / count, i = at % count, to = (2 * r) * count + i;
        float c, s;
        cosine_and_sine((float)positions[r] * frequencies[i], &c, &s);
        for (int64_t half = 0; half < 2; half++) {
            cosine[to + half * count] = c * scale;
            sine[to + half * count] = s * scale;
        }
    }
}

typedef struct {
    const float *x;             /* [rows, heads, width], rows and heads as far apart as is said */
    const float *cosine, *sine; /* [rows, turned] */
    float *y;                   /* [rows, heads, width] */
    int64_t rows, heads, width, turned, between_rows, between_heads;
} Turn;

/* Number i of a head with number i + turned / 2; what is wider than that stays. */
static void turn_row(const Turn *a, int64_t r) {
    const int64_t half = a->turned / 2;
    const float *cosine = a->cosine + r * a->turned, *sine = a->sine + r * a->turned;
    for (int64_t h = 0; h < a->heads; h++) {
        const float *x = a->x + r * a->between_rows + h * a->between_heads;
        float *y = a->y + (r * a->heads + h) * a->width;
        for (int64_t i = 0; i < half; i++) {
            y[i] = x[i] * cosine[i] + -x[i + half] * sine[i];
            y[i + half] = x[i + half] * cosine[i + half] + x[i] * sine[i + half];
        }
        memcpy(y + a->turned, x + a->turned, sizeof(float) * (a->width - a->turned));
    }
}

void flowspec_turn(const Turn *a) {
    for (int64_t r = 0; r < a->rows; r++)
        turn_row(a, r);
}

/* ---------------------------------------------------------------------------------------------------------
 * attention */

/* Rows as a cache of levels holds them: levels [rows, width], and steps [rows, groups]. */
void flowspec_levels(const float *x, int64_t rows, int64_t width, int8_t *levels, float *steps) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t from = 0; from < width; from += GROUP) {
            int64_t at = r * width + from, count = width - from < GROUP ? width - from : GROUP;
            int8_t found[GROUP];
            *steps++ = round_group(x + at, count, found, NULL, NULL);
            memcpy(levels + at, found, count);
        }
}

typedef struct {
    const float *keys, *values; /* [rows, kv_heads, width], rows and heads as far apart as is said */
    const int64_t *places;      /* [rows]: slots */
    void *to_keys, *to_values; /* a cache, as below */
    uint16_t *key_steps, *value_steps;
    int64_t rows, kv_heads, width, value_width, slots, between_keys, between_key_heads, between_values,
        between_value_heads;
    int32_t cache_kind;
} Stored;

/* Of a key or a value of so many numbers: those that share a step, the last of them fewer. */
INLINE int64_t groups_in(int64_t width) { return (width + GROUP - 1) / GROUP; }

/* GROUP numbers of a key or a value, or fewer. */
INLINE void store_group(const Stored *a, const float *numbers, int64_t count, int64_t head, int64_t slot,
                        int64_t d, int is_key) {
    int8_t levels[GROUP];
    int64_t groups = groups_in(a->width), block = head * (a->slots / LANES) + slot / LANES;
    int64_t key = (block * a->width + d) * LANES + slot % LANES;
    int64_t value = (head * a->slots + slot) * a->value_width + d;
    if (a->cache_kind == LEVELS8) {
        float step = round_group(numbers, count, levels, NULL, NULL);
        if (is_key)
            narrow_one(a->key_steps, (block * groups + d / GROUP) * LANES + slot % LANES, FLOAT16, step);
        else
            narrow_one(a->value_steps, (head * a->slots + slot) * groups + d / GROUP, FLOAT16, step);
        if (!is_key)
            memcpy((int8_t *)a->to_values + value, levels, count);
        for (int64_t i = 0; i < count && is_key; i++)
            ((int8_t *)a->to_keys)[key + i * LANES] = levels[i];
        return;
    }
    if (!is_key)
        FOR_KIND(a->cache_kind, NARROW_ALL, numbers, count, a->to_values, value);
    for (int64_t i = 0; i < count && is_key; i++)
        narrow_one(a->to_keys, key + i * LANES, a->cache_kind, numbers[i]);
}

/* A row's keys and values to their slots. */
static void store_row(const Stored *a, int64_t r) {
    for (int64_t head = 0; head < a->kv_heads; head++)
        for (int64_t d = 0; d < a->width; d += GROUP) {
            const int64_t count = a->width - d < GROUP ? a->width - d : GROUP;
            const float *key = a->keys + r * a->between_keys + head * a->between_key_heads + d;
            const float *value = a->values + r * a->between_values + head * a->between_value_heads + d;
            store_group(a, key, count, head, a->places[r], d, 1);
            store_group(a, value, count, head, a->places[r], d, 0);
        }
}

void flowspec_store(const Stored *a) {
    for (int64_t r = 0; r < a->rows; r++)
        store_row(a, r);
}

typedef struct {
    const float *queries; /* [rows, heads, width] */
    const void *keys;    /* [kv_heads, slots / 16, width, 16] of `cache_kind` */
    const void *values;  /* [kv_heads, slots, value_width] of `cache_kind` */
    const uint16_t *key_steps;   /* of levels, in float16: [kv_heads, slots / 16, groups, 16] */
    const uint16_t *value_steps; /* [kv_heads, slots, groups] */
    const uint8_t *seen;  /* [rows, high]: whether a row sees a slot */
    const int32_t *order; /* slots by position; those that nobody sees are left out */
    const int32_t *ends;  /* [blocks]: in `order`, where each block of positions ends */
    const float *sinks;   /* [heads], or none: a score that has a share, and no value */
    float *found;         /* as queries */
    int64_t rows, heads, kv_heads, width, value_width, slots, high,
        blocks;                    /* value_width: the next multiple of 16 */
    float scale, cap, cap_inverse; /* scores are bounded by `cap`; 0: they are not */
    int32_t cache_kind;
} Attention;

/* Sixteen slots' keys, as numbers. */
INLINE const float *keys_of(const Attention *a, int kind, int64_t block, float *room) {
    int64_t at = block * a->width * LANES;
    if (kind == FLOAT32)
        return (const float *)a->keys + at;
    for (int64_t d = 0; d < a->width; d++)
        for (int64_t i = 0; i < LANES; i += WIDTH) {
            int64_t place = at + d * LANES + i;
            vector key;
            if (kind == LEVELS8)
                key = widened_levels((const int8_t *)a->keys + place) *
                      widened(a->key_steps, (block * groups_in(a->width) + d / GROUP) * LANES + i, FLOAT16);
            else
                key = widened(a->keys, place, kind);
            store(room + d * LANES + i, key);
        }
    return room;
}

/* WIDTH numbers of a slot's value, of a head whose slots begin at `first`; they lie in one group. */
INLINE vector value_of(const Attention *a, int kind, int64_t slot, int64_t from) {
    int64_t at = slot * a->value_width + from;
    if (kind != LEVELS8)
        return widened(a->values, at, kind);
    float step = from_half(a->value_steps[slot * groups_in(a->width) + from / GROUP]);
    return widened_levels((const int8_t *)a->values + at) * all(step);
}

#if VECTOR_BYTES == 32
#define VALUES_MAX 2 /* vectors of a value that are summed at once, for each of QUERIES queries */
#else
#define VALUES_MAX 4
#endif
#if VECTOR_BYTES == 64
#define KEY_BLOCKS 2 /* blocks of sixteen slots whose scores are summed at once, for each of QUERIES queries */
#else
#define KEY_BLOCKS 1
#endif

/* Scores of `count` queries with sixteen slots of each of some blocks (both constants), summed number by number
 * of the head's width. */
INLINE void scores_of(const Attention *a, const float *const *queries, int count, int some,
                      const float *const *keys, const int64_t *blocks, float **scores) {
    vector sums[QUERIES][KEY_BLOCKS * PARTS];
#pragma GCC unroll 8
    for (int q = 0; q < count; q++)
#pragma GCC unroll 8
        for (int p = 0; p < some * PARTS; p++)
            sums[q][p] = all(0);
    for (int64_t d = 0; d < a->width; d++) {
        vector key[KEY_BLOCKS * PARTS];
#pragma GCC unroll 8
        for (int p = 0; p < some * PARTS; p++)
            key[p] = load(keys[p / PARTS] + d * LANES + p % PARTS * WIDTH);
#pragma GCC unroll 8
        for (int q = 0; q < count; q++)
#pragma GCC unroll 8
            for (int p = 0; p < some * PARTS; p++)
                sums[q][p] += all(queries[q][d]) * key[p];
    }
#pragma GCC unroll 8
    for (int q = 0; q < count; q++)
#pragma GCC unroll 8
        for (int p = 0; p < some * PARTS; p++) {
            vector score = sums[q][p] * all(a->scale);
            if (a->cap > 0)
                score = hyperbolic(score * all(a->cap_inverse)) * all(a->cap);
            store(scores[q] + blocks[p / PARTS] * LANES + p % PARTS * WIDTH, score);
        }
}

/* Which of the WIDTH slots of a block from number `from` on are seen; `seen` has a bit for each of LANES. */
INLINE integers lanes_seen(uint16_t seen, int from) {
    integers bits;
    for (int i = 0; i < WIDTH; i++)
        bits[i] = 1 << (from + i);
    return ((int32_t)seen & bits) != 0;
}

/* From scores to e^(score - greatest), and 0 for slots that the row does not see; no number if one of the
 * scores that it sees is none. Returns the greatest, which is no less than `sink`. */
INLINE float shares_of(const uint16_t *seen, int64_t blocks, float sink, float *scores) {
    vector highest = all(-INFINITY);
    integers is_odd = highest != highest;
    for (int64_t b = 0; b < blocks; b++)
        for (int p = 0; p < PARTS && seen[b]; p++) {
            vector score = load(scores + b * LANES + p * WIDTH);
            score = chosen(lanes_seen(seen[b], p * WIDTH), score, all(-INFINITY));
            is_odd |= score != score;
            highest = greatest(score, highest);
        }
    float most = sink;
    for (int i = 0; i < WIDTH; i++)
        most = is_odd[i] || most != most ? NAN : highest[i] > most ? highest[i] : most;
    vector shares[TOGETHER];
    float *at[TOGETHER];
    integers are_seen[TOGETHER];
    int some = 0;
    for (int64_t b = 0; b < blocks; b++)
        for (int p = 0; p < PARTS && seen[b]; p++) {
            at[some] = scores + b * LANES + p * WIDTH;
            are_seen[some] = lanes_seen(seen[b], p * WIDTH);
            shares[some] = load(at[some]) - all(most);
            if (++some == TOGETHER) {
                exponentials(shares, TOGETHER);
                EACH(i, TOGETHER) store(at[i], chosen(are_seen[i], shares[i], all(0.0f)));
                some = 0;
            }
        }
    for (int i = 0; i < some; i++)
        store(at[i], chosen(are_seen[i], exponential(shares[i]), all(0.0f)));
    return most;
}

/* Adds the values of one block of positions, of a head whose slots begin at `first`, to `totals`: `vectors` (a
 * constant, at most VALUES_MAX) of them from number `from` on, and where `weights` is given what they weigh. A
 * slot that a query does not see is left out, whatever lies there. With `is_whole`, a constant, there are QUERIES,
 * and all of them see all slots. */
INLINE void values_of(const Attention *a, int64_t first, int kind, int vectors, int is_whole, int64_t from,
                      int count, float *const *shares, const uint8_t *const *seen, int64_t begin, int64_t end,
                      float *totals, float *weights) {
    vector sums[QUERIES][VALUES_MAX];
    float weight[QUERIES] = {0};
    for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++)
            sums[q][v] = all(0);
    for (int64_t j = begin; j < end; j++) {
        int64_t slot = a->order[j];
        int who = is_whole ? (1 << QUERIES) - 1 : 0;
        for (int q = 0; q < count && !is_whole; q++)
            who |= (seen[q][slot] != 0) << q;
        if (!who)
            continue;
        vector value[VALUES_MAX];
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++)
            value[v] = value_of(a, kind, first + slot, from + v * WIDTH);
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; q++)
            if (who >> q & 1) {
                weight[q] += shares[q][slot];
#pragma GCC unroll 16
                for (int v = 0; v < vectors; v++)
                    sums[q][v] += all(shares[q][slot]) * value[v];
            }
    }
    for (int q = 0; q < count; q++) {
        float *total = totals + q * a->value_width + from;
        for (int v = 0; v < vectors; v++)
            store(total + v * WIDTH, load(total + v * WIDTH) + sums[q][v]);
        if (weights)
            weights[q] += weight[q];
    }
}

/* What at most ROWS_SHARED rows see, whatever the head: `slots` [rows + 1, blocks of sixteen slots], a bit for
 * each slot, the last row what any sees; `is_whole` [rows, blocks of positions], whether a row sees all of one. */
typedef struct {
    uint16_t *slots;
    uint8_t *is_whole;
} Seen;

INLINE void look(const Attention *a, int64_t row_first, int64_t rows, const Seen *found) {
    int64_t blocks = (a->high + LANES - 1) / LANES;
    uint16_t *any = found->slots + rows * blocks;
    memset(found->slots, 0, sizeof(uint16_t) * (size_t)((rows + 1) * blocks));
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *seen = a->seen + (row_first + r) * a->high;
        for (int64_t s = 0; s < a->high; s++)
            found->slots[r * blocks + s / LANES] |= (uint16_t)((seen[s] != 0) << s % LANES);
        for (int64_t b = 0; b < blocks; b++)
            any[b] |= found->slots[r * blocks + b];
        int64_t j = 0;
        for (int64_t b = 0; b < a->blocks; b++) {
            uint8_t sees_all = 1;
            for (; j < a->ends[b]; j++)
                sees_all &= seen[a->order[j]] != 0;
            found->is_whole[r * a->blocks + b] = sees_all;
        }
    }
}

/* Up to QUERIES queries (row and head of one group) at a time: `first` of them on, of `many`. */
INLINE void attend(const Attention *a, int kind, int64_t kv_head, int64_t row_first, int64_t row_end,
                   const Seen *seen_here, float *room) {
    int64_t group = a->heads / a->kv_heads, blocks = (a->high + LANES - 1) / LANES,
            many = (row_end - row_first) * group;
    float *keys = room, *totals = keys + KEY_BLOCKS * a->width * LANES,
          *sinks = totals + QUERIES * a->value_width, *scores = sinks + many; /* sinks: shares */
#define QUERY(n) (((row_first + (n) / group) * a->heads + kv_head * group + (n) % group) * a->width)
    const uint16_t *slots_seen = seen_here->slots, *any = slots_seen + (row_end - row_first) * blocks;
    const uint8_t *is_whole = seen_here->is_whole;
    const float *queries[QUERIES];
    float *own[QUERIES];
    for (int64_t b = 0; b < blocks;) {
        const float *block[KEY_BLOCKS];
        int64_t which[KEY_BLOCKS];
        int some = 0, count = 0;
        for (; b < blocks && some < KEY_BLOCKS; b++)
            if (any[b]) {
                which[some] = b;
                block[some] = keys_of(a, kind, kv_head * (a->slots / LANES) + b, keys + some * a->width * LANES);
                some++;
            }
        for (int64_t n = 0; n < many && some; n++) {
            uint16_t seen = 0;
            for (int i = 0; i < some; i++)
                seen |= slots_seen[n / group * blocks + which[i]];
            if (seen) {
                queries[count] = a->queries + QUERY(n);
                own[count++] = scores + n * blocks * LANES;
            }
            if (count == QUERIES) {
                if (some == KEY_BLOCKS)
                    scores_of(a, queries, QUERIES, KEY_BLOCKS, block, which, own);
                else
                    scores_of(a, queries, QUERIES, 1, block, which, own);
                count = 0;
            }
        }
        for (int q = 0; q < count; q++)
            if (some == KEY_BLOCKS)
                scores_of(a, queries + q, 1, KEY_BLOCKS, block, which, own + q);
            else
                scores_of(a, queries + q, 1, 1, block, which, own + q);
    }
    for (int64_t n = 0; n < many; n++) {
        float sink = a->sinks ? a->sinks[kv_head * group + n % group] : -INFINITY;
        float most = shares_of(slots_seen + n / group * blocks, blocks, sink, scores + n * blocks * LANES);
        sinks[n] = a->sinks ? exponential(all(sink - most))[0] : 0;
    }
    for (int64_t n = 0; n < many; n += QUERIES) {
        int count = many - n < QUERIES ? (int)(many - n) : QUERIES;
        const uint8_t *seen[QUERIES];
        float weights[QUERIES] = {0};
        for (int q = 0; q < count; q++) {
            seen[q] = a->seen + (row_first + (n + q) / group) * a->high;
            own[q] = scores + (n + q) * blocks * LANES;
        }
        memset(totals, 0, sizeof(float) * QUERIES * a->value_width);
        int64_t begin = 0;
        for (int64_t b = 0; b < a->blocks; begin = a->ends[b++]) {
            int64_t from = 0;
            int all_see_all = count == QUERIES;
            for (int q = 0; q < count; q++)
                all_see_all &= is_whole[(n + q) / group * a->blocks + b];
            for (; from + VALUES_MAX * WIDTH <= a->value_width; from += VALUES_MAX * WIDTH)
                if (all_see_all)
                    values_of(a, kv_head * a->slots, kind, VALUES_MAX, 1, from, count, own, seen, begin,
                              a->ends[b], totals, from ? NULL : weights);
                else
                    values_of(a, kv_head * a->slots, kind, VALUES_MAX, 0, from, count, own, seen, begin,
                              a->ends[b], totals, from ? NULL : weights);
            for (; from < a->value_width; from += WIDTH)
                values_of(a, kv_head * a->slots, kind, 1, 0, from, count, own, seen, begin, a->ends[b], totals,
                          from ? NULL : weights);
        }
        for (int q = 0; q < count; q++) {
            const float *total = totals + q * a->value_width, weight = weights[q] + sinks[n + q];
            float *found = a->found + QUERY(n + q);
            for (int64_t d = 0; d < a->width; d++)
                found[d] = total[d] / weight;
        }
    }
#undef QUERY
}

#define ROWS_SHARED 16 /* rows that share what is widened of the keys */

/* How rows are divided: chunks that share keys, each for each head of these; and what a chunk needs. */
typedef struct {
    int64_t chunks, blocks, shared, numbers; /* numbers: of the room for a unit */
    size_t seen_slots, seen_blocks;
} Chunks;

INLINE Chunks chunks_of(const Attention *a) {
    Chunks found = {.chunks = (a->rows + ROWS_SHARED - 1) / ROWS_SHARED, .blocks = (a->high + LANES - 1) / LANES};
    found.shared = a->rows < ROWS_SHARED ? a->rows : ROWS_SHARED;
    found.numbers = KEY_BLOCKS * a->width * LANES + a->value_width * QUERIES +
                    found.shared * (a->heads / a->kv_heads) * (1 + found.blocks * LANES);
    found.seen_slots = (size_t)((found.shared + 1) * found.blocks);
    found.seen_blocks = (size_t)(found.shared * a->blocks);
    return found;
}

/* Where `room` has what rows of a chunk see. */
INLINE Seen seen_of(const Chunks *chunks, int64_t chunk, void *room) {
    uint16_t *slots = room;
    uint8_t *is_whole = (uint8_t *)(slots + chunks->chunks * chunks->seen_slots);
    return (Seen){slots + chunk * chunks->seen_slots, is_whole + chunk * chunks->seen_blocks};
}

INLINE size_t seen_bytes(const Chunks *chunks) {
    return (size_t)chunks->chunks * (sizeof(uint16_t) * chunks->seen_slots + chunks->seen_blocks) + 1;
}

static void look_chunk(const Attention *a, const Chunks *chunks, int64_t chunk, void *seen_room) {
    int64_t first = chunk * ROWS_SHARED, rows = a->rows - first < ROWS_SHARED ? a->rows - first : ROWS_SHARED;
    Seen seen = seen_of(chunks, chunk, seen_room);
    look(a, first, rows, &seen);
}

/* Unit number `unit`: a chunk and a head of keys. */
static void attend_unit(const Attention *a, const Chunks *chunks, int64_t unit, void *seen_room, float *room) {
    int64_t first = unit / a->kv_heads * ROWS_SHARED,
            end = first + ROWS_SHARED < a->rows ? first + ROWS_SHARED : a->rows;
    Seen seen = seen_of(chunks, unit / a->kv_heads, seen_room);
    if (a->cache_kind == FLOAT32)
        attend(a, FLOAT32, unit % a->kv_heads, first, end, &seen, room);
    else if (a->cache_kind == BFLOAT16)
        attend(a, BFLOAT16, unit % a->kv_heads, first, end, &seen, room);
    else if (a->cache_kind == FLOAT16)
        attend(a, FLOAT16, unit % a->kv_heads, first, end, &seen, room);
    else
        attend(a, LEVELS8, unit % a->kv_heads, first, end, &seen, room);
}

/* -------------------------------------------------------------------------------------------------------------
 * linear attention */

typedef struct {
    const float *queries, *keys;  /* [rows, key_heads, key_width] */
    const float *values;          /* [rows, heads, value_width] */
    const float *decays, *shares; /* [rows, heads] */
    float *first, *states; /* [heads, key_width, value_width]: place 0, and [places, ...]: those from 1 on */
    const int32_t *steps;         /* [count, 4]: row, source, target, output (below 0: none) */
    float *found;                 /* [outputs, heads, value_width] */
    int64_t count, key_heads, heads, key_width, value_width; /* key_width: at most KEY_WIDTH_MAX */
} Delta;

/* A column of a state depends on no other one. So all steps are done with COLUMNS of a head's, a strip, before the
 * next: a strip stays in the nearest cache, where a head's whole state would not. */
#define COLUMNS 32
#define STRIPES (COLUMNS / WIDTH)
#define KEY_WIDTH_MAX 256
#define FOLD 8 /* parts of a strip, of which numbers are summed in registers: three halvings */
#define GAP 64 /* numbers between parts: addresses that are whole 4 KB apart would get in each other's way */

typedef struct {
    float strip[KEY_WIDTH_MAX * COLUMNS + FOLD * GAP] __attribute__((aligned(64)));
    vector sums[KEY_WIDTH_MAX][STRIPES], change[STRIPES];
} DeltaRoom;

/* The first `columns` of COLUMNS numbers of each row; rows are `between` apart. */
INLINE void copy_rows(const float *from, int64_t between_from, float *to, int64_t between_to, int64_t rows,
                      int64_t columns) {
    for (int64_t i = 0; i < rows; i++, from += between_from, to += between_to)
        if (columns == COLUMNS)
            for (int s = 0; s < COLUMNS; s += WIDTH)
                store(to + s, load(from + s));
        else
            memcpy(to, from, sizeof(float) * (size_t)columns);
}

enum { DECAY, LEARN };

/* One half of a step, a constant, with WIDTH numbers of a strip; what they add to its sum. */
INLINE vector term_of(int half, float *at, float decay, float key, vector change, float query) {
    vector state = half == DECAY ? load(at) * all(decay) : load(at) + all(key) * change;
    store(at, state);
    return state * all(half == DECAY ? key : query);
}

/* Half of a step with a strip; its sum is `sums[0]` then. `fold`, a constant, is FOLD where the width is a power of
 * two and no less, else 1: the strip lacks the rows that would fill it up, which add zeros. */
INLINE void half_of(int half, int fold, int64_t width, float decay, const float *key, const float *query,
                    DeltaRoom *room) {
    int64_t count = 1;
    while (count * fold < width)
        count *= 2;
#define TERM(part)                                                                                           \
    term_of(half, room->strip + (part) * (count * COLUMNS + GAP) + i * COLUMNS + s * WIDTH, decay,           \
            key[(part) * count + i], room->change[s], query[(part) * count + i])
    for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 8
        for (int s = 0; s < STRIPES; s++)
            if (fold == FOLD) {
                vector even = (TERM(0) + TERM(4)) + (TERM(2) + TERM(6));
                room->sums[i][s] = even + ((TERM(1) + TERM(5)) + (TERM(3) + TERM(7)));
            } else
                room->sums[i][s] = i < width ? TERM(0) : all(0.0f);
#undef TERM
    while (count /= 2)
        for (int64_t i = 0; i < count; i++)
            for (int s = 0; s < STRIPES; s++)
                room->sums[i][s] += room->sums[i + count][s];
}

/* All steps with the strip of a head that begins at `column`. */
INLINE void strip_steps(const Delta *a, int fold, int64_t head, int64_t column, DeltaRoom *room) {
    int64_t columns = a->value_width - column < COLUMNS ? a->value_width - column : COLUMNS;
    int64_t key_head = head / (a->heads / a->key_heads), width = a->key_width, rows = width / fold;
    int64_t between = a->value_width, of_place = a->heads * width * between;
    size_t bytes = sizeof(float) * (size_t)columns;
    const int64_t own = head * width * between + column;
    float *first = a->first + own, *states = a->states + own - of_place;
    const int32_t *step = a->steps, *end = step + 4 * a->count;
    if (columns < COLUMNS)
        memset(room, 0, sizeof *room); /* columns that are not there are zeros */
    for (int32_t held = -1; step < end; held = step[2], step += 4) {
        int64_t at = step[0] * a->heads + head, key_at = (step[0] * a->key_heads + key_head) * width;
        const float *key = a->keys + key_at, *query = a->queries + key_at;
        const float *from = step[1] ? states + step[1] * of_place : first;
        float *to = step[2] ? states + step[2] * of_place : first;
        for (int part = 0; part < fold && step[1] != held; part++)
            copy_rows(from + part * rows * between, between, room->strip + part * (rows * COLUMNS + GAP), COLUMNS,
                      rows, columns);
        half_of(DECAY, fold, width, a->decays[at], key, query, room);
        memcpy(room->change, a->values + at * between + column, bytes);
        for (int s = 0; s < STRIPES; s++)
            room->change[s] = (room->change[s] - room->sums[0][s]) * all(a->shares[at]);
        half_of(LEARN, fold, width, a->decays[at], key, query, room);
        if (step[3] >= 0)
            memcpy(a->found + (step[3] * a->heads + head) * between + column, room->sums[0], bytes);
        if (step + 4 < end && step[5] == step[2] && step[6] == step[2])
            continue; /* the next step begins with this state, and puts another in its place */
        for (int part = 0; part < fold; part++)
            copy_rows(room->strip + part * (rows * COLUMNS + GAP), COLUMNS, to + part * rows * between, between, rows,
                      columns);
    }
}

static void head_steps(const Delta *a, int64_t head) {
    const int is_folded = a->key_width >= FOLD && (a->key_width & (a->key_width - 1)) == 0;
    DeltaRoom room;
    for (int64_t column = 0; column < a->value_width; column += COLUMNS)
        if (is_folded)
            strip_steps(a, FOLD, head, column, &room);
        else
            strip_steps(a, 1, head, column, &room);
}

/* -------------------------------------------------------------------------------------------------------------
 * programs */

/* A layer as a list of operations on registers, which have so many numbers of each row. One call runs all of them
 * for all rows, by one team of threads, which wait for each other where an operation `waits`. Those of rows go by
 * row, so that one may follow another without a wait; those of outputs go by output. Nothing is allocated: the
 * caller lends room. Registers are float32; hidden states, and what else comes with rows and goes on, are of a kind. */
enum { NORM, DIVIDE, PAIR, ROUND, LINEAR, PAIRS, PACKED, HALVES, TURN, STORE, ATTEND, GATE, ADD, COPY, CLIP, CHOOSE,
       SORT, GATHER, MIX, MULTIPLY, SCALE, HOLD, CONVOLVE, RECALL, STEP_STATES, LOAD, LOAD_EMBEDDING, LOOK_UP, CARRY,
       LEAVE, NARROW };
enum { SHARES, SHARES_TO_ONE, SHARES_OF_CHOSEN, SHARES_APART }; /* how rows choose experts (`plain.choose`) */
#define REGISTERS_MAX 48
#define ALIGNED(bytes) (((bytes) + 63) / 64 * 64)

typedef struct {
    const void *weights; /* or the order of what is copied */
    const float *bias;
    const float *scales;
    int64_t from_at, with_at, to_at; /* the first number of a row in its register */
    int64_t in, out;
    int32_t code, from, with, to, waits;
    int32_t how, kind, heads, kv_heads; /* kind: of weights, or their form, or of what rows are copied to */
    int32_t spread, experts; /* how many rows a row has in these registers: one, or one for each of its experts; among
                                how many matrices these choose, whose addresses are `weights` and `scales` */
    float factor, eps, cap;
} Operation;

typedef struct {
    const Operation *operations;
    const int64_t *widths, *starts; /* of registers: starts are multiples of 64, for a row; several may share one */
    int64_t count, registers, numbers, sums, products; /* numbers of all registers, sums in float32, and products,
                                                          for a row */
    int32_t kind, experts, chosen; /* kind: of hidden states; experts: of a mixture; and how many a row chooses */
} Program;

/* Rows of one expert, one after another. */
typedef struct {
    int64_t first, rows;
    int32_t expert;
} Segment;

/* What rows chose: of row r the experts and their shares r * chosen and on; then, sorted by expert, whose row each
 * is and of which segment; and of row r, expert by expert, where its own are. */
typedef struct {
    int32_t *experts, *row_of, *segment_of, *of_row;
    float *shares;
    Segment *segments;
    int64_t *count; /* of segments */
} Routes;

/* What a request holds of a layer, as in `Attention` and `Stored`. */
typedef struct {
    void *keys, *values;
    uint16_t *key_steps, *value_steps;
    void *inputs; /* [slots, inputs_width]: what layers hold that do not attend */
    float *state; /* where its steps begin, and end with the last that is committed */
    int64_t slots, inputs_width;
    int32_t kind;
} Cache;

/* Rows of a request, and what these see. */
typedef struct {
    const Cache *cache;
    const int64_t *slots; /* of the rows */
    const uint8_t *seen;
    const int32_t *order, *ends;
    const int64_t *lines; /* of each row, or node of the steps: the slots of the last inputs, the oldest first */
    const int32_t *steps; /* as in `Delta`, over so many places; a row's output is its place among these rows */
    int64_t first, rows, high, blocks, nodes, steps_count, places;
} Part;

typedef struct {
    void *hidden, *going; /* going: what rows take to later slices */
    const float *cosine, *sine;
    const void *embedding;
    const int64_t *tokens;
    const Part *parts;
    void *room; /* aligned to 64 bytes */
    int64_t rows, parts_count, room_bytes, angles; /* angles: numbers of a row's cosine */
    int64_t between_embeddings, between_going;
    int32_t threads;
} Call;

/* A call, and where its registers, prepared rows, sums and rooms begin. */
typedef struct {
    const Program *program;
    const Call *call;
    float *registers[REGISTERS_MAX];
    char *prepared, *own; /* own: rooms of threads */
    float *sums, *recalled, *states; /* recalled: what steps of states take of their nodes; states between them */
    Routes routes;
    int64_t own_bytes, bytes;
    int32_t threads;
} Run;

INLINE int64_t width_of(const Run *run, const Operation *o, int32_t number) {
    return run->program->widths[number] / o->spread;
}

INLINE float *at_row(const Run *run, const Operation *o, int32_t number, int64_t row, int64_t at) {
    return run->registers[number] + row * width_of(run, o, number) + at;
}

/* The rows as `code` prepares them for products with matrices of so many inputs: by blocks where they are many; in
 * pairs; or rounded, group by group. */
INLINE int64_t prepared_bytes(int32_t code, int32_t times, int64_t rows, int64_t in) {
    if (code == DIVIDE)
        return rows > ROWS_FEW ? 4 * rows * ((in + INPUTS_AT_ONCE - 1) / INPUTS_AT_ONCE * INPUTS_AT_ONCE) : 0;
    if (code == PAIR)
        return 2 * (rows + PAIR_ROWS) * ((in + STEP - 1) / STEP * STEP) + 64;
    return code == ROUND ? (int64_t)sizeof(Rounded) * times * rows * ((in + GROUP - 1) / GROUP) : 0;
}

/* No less than `prepared_bytes` of so many rows are these bytes for each, and the slack. */
INLINE int64_t prepared_row(int32_t code, int32_t times, int64_t in, int64_t *slack) {
    *slack = 128;
    if (code == DIVIDE)
        return 4 * (in + INPUTS_AT_ONCE);
    if (code == PAIR) {
        *slack += 2 * PAIR_ROWS * (in + STEP);
        return 2 * (in + STEP);
    }
    return prepared_bytes(code, times, 1, in);
}

/* Where the rows of a segment are prepared: its number counts, since each has its slack. */
INLINE char *prepared_at(const Run *run, int32_t code, const Operation *o, int64_t number) {
    int64_t slack, row = prepared_row(code, o->how, o->in, &slack);
    return run->prepared + ALIGNED(run->routes.segments[number].first * row + number * slack);
}

static Attention attention_of(const Run *run, const Operation *o, const Part *part) {
    const Cache *cache = part->cache;
    return (Attention){.queries = at_row(run, o, o->from, part->first, 0), .keys = cache->keys,
                       .values = cache->values, .key_steps = cache->key_steps, .value_steps = cache->value_steps,
                       .seen = part->seen, .sinks = o->bias,
                       .order = part->order, .ends = part->ends, .found = at_row(run, o, o->to, part->first, 0),
                       .rows = part->rows, .heads = o->heads, .kv_heads = o->kv_heads, .width = o->in,
                       .value_width = (o->in + LANES - 1) / LANES * LANES, .slots = cache->slots,
                       .high = part->high, .blocks = part->blocks, .scale = o->factor, .cap = o->cap,
                       .cap_inverse = o->cap > 0 ? 1 / o->cap : 0, .cache_kind = cache->kind};
}

/* Numbers of a node that a step takes. */
INLINE int64_t recalled_width(const Operation *o) { return 2 * o->kv_heads * o->in + o->heads * (o->out + 2); }

/* The steps of a part, whose nodes and places lie behind those of the parts before. */
static Delta delta_of(const Run *run, const Operation *o, int64_t number) {
    const Part *part = run->call->parts + number;
    const int64_t keys = o->kv_heads * o->in, values = o->heads * o->out;
    float *at = run->recalled, *states = run->states;
    for (const Part *before = run->call->parts; before < part; before++) {
        at += before->nodes * recalled_width(o);
        states += (before->places - 1) * o->heads * o->in * o->out;
    }
    const int64_t nodes = part->nodes;
    return (Delta){.queries = at, .keys = at + nodes * keys, .values = at + 2 * nodes * keys,
                   .decays = at + nodes * (2 * keys + values),
                   .shares = at + nodes * (2 * keys + values + o->heads), .first = part->cache->state,
                   .states = states, .steps = part->steps,
                   .found = run->registers[o->to] + part->first * values, .count = part->steps_count, .key_heads = o->kv_heads,
                   .heads = o->heads, .key_width = o->in, .value_width = o->out};
}

/* Where everything lies, from the beginning of the room; returns how many bytes that takes. */
static int64_t lay_out(Run *run) {
    const Program *program = run->program;
    const int64_t rows = run->call->rows;
    int64_t prepared = 0, own = 0, recalled = 0, states = 0;
    char *at = run->call->room;
    for (int64_t r = 0; r < program->registers; r++)
        run->registers[r] = (float *)at + program->starts[r] * rows;
    at += ALIGNED(4 * rows * program->numbers);
    run->sums = (float *)at;
    at += ALIGNED(4 * rows * program->sums);
    for (int64_t i = 0; i < program->count; i++) {
        const Operation *o = program->operations + i;
        int64_t slack, bytes = prepared_bytes(o->code, o->how, rows, o->in), room = 0, all = rows * o->spread;
        if (o->experts && o->code <= ROUND)
            bytes = all * prepared_row(o->code, o->how, o->in, &slack) + (all < o->experts ? all : o->experts) * slack + 64;
        prepared = bytes > prepared ? bytes : prepared;
        if (o->code == NORM)
            room = 4 * norm_room(o->in);
        else if (o->code == LINEAR && all > ROWS_FEW)
            room = sizeof(Blocks);
        else if (o->code == HALVES)
            room = 4 * half_room(o->in);
        else if (o->code == CHOOSE)
            room = 8 * (o->in + WIDTH) + 4 * (half_room(o->in) + 3 * o->in + WIDTH);
        else if (o->code == RECALL) {
            room = 4 * (2 * o->kv_heads * o->in + o->heads * o->out + half_room(o->in) + WIDTH);
            for (int64_t p = 0; p < run->call->parts_count; p++) {
                recalled += run->call->parts[p].nodes * recalled_width(o);
                states += (run->call->parts[p].places - 1) * o->heads * o->in * o->out;
            }
        }
        for (int64_t p = 0; p < run->call->parts_count && o->code == ATTEND; p++) {
            Attention a = attention_of(run, o, run->call->parts + p);
            Chunks chunks = chunks_of(&a);
            int64_t unit = ALIGNED(seen_bytes(&chunks)) + 4 * chunks.numbers;
            room = unit > room ? unit : room;
        }
        own = room > own ? room : own;
    }
    const int64_t chosen = ALIGNED(4 * rows * program->chosen);
    run->routes = (Routes){(int32_t *)at, (int32_t *)(at + chosen), (int32_t *)(at + 2 * chosen),
                           (int32_t *)(at + 3 * chosen), (float *)(at + 4 * chosen), (Segment *)(at + 5 * chosen),
                           (int64_t *)(at + 5 * chosen + ALIGNED(sizeof(Segment) * program->experts))};
    at += program->experts ? 5 * chosen + ALIGNED(sizeof(Segment) * program->experts) + 64 : 0;
    run->recalled = (float *)at;
    at += ALIGNED(4 * recalled);
    run->states = (float *)at;
    at += ALIGNED(4 * states);
    run->prepared = at;
    at += ALIGNED(prepared);
    run->own = at;
    run->own_bytes = ALIGNED(own);
    return at + run->own_bytes * run->threads - (char *)run->call->room;
}

/* `clamped` of `model/arithmetic/plain.py`: no farther from 0 than the cap, and gated with the factor. */
INLINE void clamp_row(const Operation *o, const float *gates, const float *values, float *to) {
    const vector limit = all(o->cap), slope = all(o->factor);
    for (int64_t i = 0; i < o->in; i += WIDTH) {
        const int64_t count = o->in - i < WIDTH ? o->in - i : WIDTH;
        float gate[WIDTH] = {0}, value[WIDTH] = {0};
        memcpy(gate, gates + i, sizeof(float) * count);
        memcpy(value, values + i, sizeof(float) * count);
        vector up = load(value), found = load(gate);
        found = chosen(found > limit, limit, found) * slope;
        up = chosen(up > limit, limit, chosen(up < -limit, -limit, up));
        functions_of(&found, 1, SILU);
        store(gate, found / slope * (up + all(1.0f)));
        memcpy(to + i, gate, sizeof(float) * count);
    }
}

/* Numbers times one, which may be a function of a number of the row's own. */
INLINE void scale_row(const Run *run, const Operation *o, int64_t r, float *x) {
    float factor = o->factor;
    if (o->with >= 0) {
        vector found = all(*at_row(run, o, o->with, r, o->with_at));
        functions_of(&found, 1, o->how);
        factor = found[0];
    }
    for (int64_t i = 0; i < o->in; i++)
        x[i] *= factor;
}

/* WIDTH numbers of a slot's inputs, fewer at the end; zeros where the text has not begun. */
INLINE vector held_inputs(int kind, const Cache *cache, int64_t slot, int64_t i, int64_t count) {
    float some[WIDTH] = {0};
    if (slot >= 0)
        widen_all(cache->inputs, slot * cache->inputs_width + i, kind, count, some);
    return load(some);
}

/* Number i and on of a short convolution over a line's inputs: weights [length, width], the oldest first. */
INLINE vector convolved(int kind, const Cache *cache, const int64_t *line, int64_t length, const float *weights,
                        int64_t width, int64_t i, int64_t count) {
    vector total = all(0.0f);
    for (int64_t place = 0; place < length; place++) {
        float some[WIDTH] = {0};
        memcpy(some, weights + place * width + i, sizeof(float) * count);
        vector more = held_inputs(kind, cache, line[place], i, count) * load(some);
        total = place ? total + more : more;
    }
    return total;
}

INLINE void convolve_row(int kind, const Run *run, const Operation *o, const Part *part, int64_t r) {
    const int64_t *line = part->lines + (r - part->first) * o->out;
    for (int64_t i = 0; i < o->in; i += WIDTH) {
        const int64_t count = o->in - i < WIDTH ? o->in - i : WIDTH;
        float found[WIDTH];
        store(found, convolved(kind, part->cache, line, o->out, o->weights, o->in, i, count));
        for (int64_t c = 0; c < count && o->bias != NULL; c++)
            found[c] += ((const float *)o->bias)[i + c];
        memcpy(at_row(run, o, o->to, r, o->to_at + i), found, sizeof(float) * count);
    }
}

/* log(1 + e^x), as `plain.softplus` has it. */
INLINE vector softplus(vector x) {
    const vector size = (vector)((integers)x & 0x7fffffff), power = exponential(-size);
    const vector ratio = power / (all(2.0f) + power), square = ratio * ratio;
    vector series = all(1.0f / 15);
    for (int odd = 13; odd > 2; odd -= 2)
        series = series * square + all(1.0f / (float)odd);
    const vector above = chosen(x > all(0.0f), x, chosen(x == x, all(0.0f), x));
    return above + all(2.0f) * (ratio + ratio * (square * series));
}

/* Heads [count, width] of one length, times a factor. */
INLINE void unit_heads(const float *x, int64_t count, int64_t width, float eps, float factor, float *y, float *room) {
    for (int64_t h = 0; h < count; h++) {
        for (int64_t i = 0; i < width; i++)
            y[h * width + i] = x[h * width + i] * x[h * width + i];
        const float over = 1.0f / sqrtf(halves_sum(y + h * width, width, half_room(width), room) + eps);
        for (int64_t i = 0; i < width; i++)
            y[h * width + i] = x[h * width + i] * over * factor;
    }
}

/* What a step takes of node `n` of a part, from the inputs that are held of it: queries, keys and values, then two
 * numbers of each head. `scales`: how fast each head's state fades, and what is added to its rate. */
INLINE void recall_row(int kind, const Operation *o, const Part *part, const Delta *to, int64_t n, float *own) {
    const int64_t keys = o->kv_heads * o->in, values = o->heads * o->out, width = 2 * keys + values;
    const int64_t *line = part->lines + n * o->how;
    for (int64_t i = 0; i < width; i += WIDTH) {
        const int64_t count = width - i < WIDTH ? width - i : WIDTH;
        float some[WIDTH];
        vector found = convolved(kind, part->cache, line, o->how, o->weights, width, i, count);
        functions_of(&found, 1, SILU);
        store(some, found);
        memcpy(own + i, some, sizeof(float) * count);
    }
    unit_heads(own, o->kv_heads, o->in, o->eps, o->factor, (float *)to->queries + n * keys, own + width);
    unit_heads(own + keys, o->kv_heads, o->in, o->eps, 1.0f, (float *)to->keys + n * keys, own + width);
    memcpy((float *)to->values + n * values, own + 2 * keys, sizeof(float) * values);
    for (int64_t h = 0; h < o->heads; h += WIDTH) {
        const int64_t count = o->heads - h < WIDTH ? o->heads - h : WIDTH, slot = line[o->how - 1];
        float fading[WIDTH] = {0}, more[WIDTH] = {0};
        memcpy(fading, o->scales + h, sizeof(float) * count);
        memcpy(more, o->scales + o->heads + h, sizeof(float) * count);
        vector share = held_inputs(kind, part->cache, slot, width + h, count);
        const vector rate = held_inputs(kind, part->cache, slot, width + o->heads + h, count);
        const vector decay = exponential(-(load(fading) * softplus(rate + load(more))));
        logistics(&share, 1);
        store(fading, decay);
        store(more, share);
        memcpy((float *)to->decays + n * o->heads + h, fading, sizeof(float) * count);
        memcpy((float *)to->shares + n * o->heads + h, more, sizeof(float) * count);
    }
}

/* Row `r`, of `rows` that are prepared together, as its product reads it. */
static void prepare_row(const Operation *o, const float *from, int64_t r, int64_t rows, char *to) {
    if (o->code == DIVIDE && rows > ROWS_FEW)
        divide_row(from, r, rows, o->in, (float *)to);
    else if (o->code == PAIR) {
        pair_row(from, r, o->in, (uint16_t *)to);
        for (int64_t more = rows; r == rows - 1 && more % PAIR_ROWS; more++)
            pair_row(NULL, more, o->in, (uint16_t *)to);
    } else if (o->code == ROUND) {
        int count;
        const int64_t first = portion_of(r, rows, &count), groups = (o->in + GROUP - 1) / GROUP;
        round_groups(from, o->in, groups, offset_of(o->kind), has_halves(o->kind), o->how,
                     (Rounded *)to + (first * groups + r - first) * o->how, count * o->how);
    }
}

/* Shares of numbers (`plain.softmax`, `plain.over_their_sum`), with room for half of them. */
INLINE void share_out(float *x, int64_t width, int are_powers, float *room) {
    float some[WIDTH] = {0}, most = x[0];
    for (int64_t i = 1; i < width; i++) /* or what is no number, if there is one */
        most = x[i] > most || x[i] != x[i] ? x[i] : most;
    for (int64_t i = 0; i < width && are_powers; i += WIDTH) {
        int64_t count = width - i < WIDTH ? width - i : WIDTH;
        memcpy(some, x + i, sizeof(float) * count);
        store(some, exponential(load(some) - all(most)));
        memcpy(x + i, some, sizeof(float) * count);
    }
    const float sum = halves_sum(x, width, half_room(width), room);
    for (int64_t i = 0; i < width; i++)
        x[i] /= sum;
}

/* Where the greatest are, the first of two alike first; what is no number is greater than all. */
INLINE void find_greatest(const float *scores, int64_t count, int64_t wanted, int32_t *found) {
    for (int64_t c = 0; c < wanted; c++) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; i++) {
            int is_taken = 0;
            for (int64_t other = 0; other < c; other++)
                is_taken |= found[other] == i;
            if (!is_taken && (best < 0 || scores[i] > scores[best] || (scores[i] != scores[i] && scores[best] == scores[best])))
                best = i;
        }
        found[c] = (int32_t)best;
    }
}

/* Leaves to the groups whose two best are best what they have; the others have nothing. */
INLINE void open_groups(float *choice, int64_t count, int64_t groups, int64_t open, float *best, int32_t *found) {
    const int64_t size = count / groups;
    for (int64_t g = 0; g < groups; g++) {
        find_greatest(choice + g * size, size, 2, found);
        best[g] = choice[g * size + found[0]] + choice[g * size + found[1]];
    }
    find_greatest(best, groups, open, found);
    for (int64_t g = 0; g < groups; g++) {
        int is_open = 0;
        for (int64_t other = 0; other < open; other++)
            is_open |= found[other] == g;
        for (int64_t i = g * size; i < (g + 1) * size && !is_open; i++)
            choice[i] = -INFINITY;
    }
}

/* The experts of a row, by its logits. Apart, each has a share of its own, to which a bias is added in choosing. */
static void choose_row(const Run *run, const Operation *o, int64_t r, float *own) {
    const int64_t count = o->in, chosen = run->program->chosen, groups = o->kv_heads;
    float some[WIDTH] = {0}, *scores = own, *choice = own + count, *room = choice + count + WIDTH;
    int32_t *experts = run->routes.experts + r * chosen;
    float *shares = run->routes.shares + r * chosen;
    memcpy(scores, run->sums + r * count, sizeof(float) * count);
    for (int64_t i = 0; i < count && o->how == SHARES_APART; i += WIDTH) {
        int64_t most = count - i < WIDTH ? count - i : WIDTH;
        memcpy(some, scores + i, sizeof(float) * most);
        store(some, all(1.0f) / (all(1.0f) + exponential(-load(some))));
        memcpy(scores + i, some, sizeof(float) * most);
    }
    if (o->how == SHARES || o->how == SHARES_TO_ONE)
        share_out(scores, count, 1, room);
    for (int64_t i = 0; i < count; i++)
        choice[i] = o->how == SHARES_APART ? scores[i] + ((const float *)o->weights)[i] : scores[i];
    if (groups > 1)
        open_groups(choice, count, groups, o->out, room, (int32_t *)(room + groups));
    find_greatest(choice, count, chosen, experts);
    for (int64_t c = 0; c < chosen; c++)
        shares[c] = scores[experts[c]];
    if (o->how == SHARES_APART) {
        const float sum = o->heads ? halves_sum(shares, chosen, half_room(chosen), room) + 1e-20f : 1.0f;
        for (int64_t c = 0; c < chosen; c++)
            shares[c] = shares[c] / sum * o->factor;
        return;
    }
    if (o->how == SHARES_OF_CHOSEN || o->how == SHARES_TO_ONE || o->heads)
        share_out(shares, chosen, o->how == SHARES_OF_CHOSEN, room);
    for (int64_t c = 0; c < chosen && o->scales != NULL; c++)
        shares[c] *= o->scales[experts[c]];
}

/* Sorts what rows chose by expert, and by row. */
static void sort_choices(const Run *run) {
    const Routes *to = &run->routes;
    const int64_t chosen = run->program->chosen, choices = run->call->rows * chosen;
    int64_t first = 0, count = 0;
    for (int32_t expert = 0; expert < run->program->experts; expert++)
        to->segments[expert] = (Segment){0, 0, expert};
    for (int64_t i = 0; i < choices; i++)
        to->segments[to->experts[i]].rows++;
    for (int32_t expert = 0; expert < run->program->experts; expert++) {
        to->segments[expert].first = first;
        first += to->segments[expert].rows;
    }
    for (int64_t i = 0; i < choices; i++)
        to->row_of[to->segments[to->experts[i]].first++] = (int32_t)i;
    for (int64_t r = chosen - 1; r < choices; r += chosen)
        to->of_row[r] = 0; /* how many of a row's are found, till the last is: it lies behind the others */
    for (int32_t expert = 0; expert < run->program->experts; expert++) {
        Segment own = to->segments[expert];
        own.first -= own.rows;
        for (int64_t slot = own.first; slot < own.first + own.rows; slot++) {
            int32_t *mine = to->of_row + to->row_of[slot] / chosen * chosen, found = mine[chosen - 1];
            mine[chosen - 1] = found + 1;
            mine[found] = (int32_t)slot;
            to->segment_of[slot] = (int32_t)count;
        }
        if (own.rows)
            to->segments[count++] = own;
    }
    *to->count = count;
}

/* A row's experts, each times its share, added in ascending order. */
INLINE void mix_row(const Run *run, const Operation *o, int64_t r) {
    const int64_t chosen = run->program->chosen, width = o->in;
    float *to = run->registers[o->to] + r * width;
    for (int64_t c = 0; c < chosen; c++) {
        const int32_t slot = run->routes.of_row[r * chosen + c];
        const float share = run->routes.shares[run->routes.row_of[slot]];
        const float *from = run->registers[o->from] + slot * width;
        for (int64_t i = 0; i < width; i++)
            to[i] = (c ? to[i] : 0.0f) + from[i] * share;
    }
}

/* Numbers of a row from one place to another. */
INLINE void copy_row(const Run *run, const Operation *o, int64_t r, float *to) {
    const int64_t *order = o->weights;
    for (int64_t i = 0; i < o->in && order != NULL; i++)
        to[i] = *at_row(run, o, o->from, r, o->from_at + order[i]);
    for (int64_t head = 0; head < o->heads && order == NULL; head++) /* which are `out` apart */
        memcpy(to + head * o->in, at_row(run, o, o->from, r, o->from_at + head * o->out), sizeof(float) * o->in);
}

/* What comes with a row of `from`, whose rows are `between` apart, of the kind of hidden states. */
INLINE void load_row(const Run *run, const Operation *o, const void *from, int64_t between, int64_t r) {
    FOR_KIND(run->program->kind, WIDEN_ALL, from, r * between, o->in, at_row(run, o, o->to, r, o->to_at));
}

/* A row's keys and values, or inputs, to what is held of its request. */
static void hold_row(const Run *run, const Operation *o, int64_t r) {
    const Part *part = run->call->parts;
    while (r >= part->first + part->rows)
        part++;
    const Cache *to = part->cache;
    const int64_t own = r - part->first;
    if (o->code == STORE) {
        Stored a = {at_row(run, o, o->from, part->first, o->from_at), at_row(run, o, o->with, part->first, o->with_at),
                    part->slots, to->keys, to->values, to->key_steps, to->value_steps, part->rows, o->kv_heads, o->in,
                    (o->in + LANES - 1) / LANES * LANES, to->slots, run->program->widths[o->from], o->in,
                    run->program->widths[o->with], o->in, to->kind};
        store_row(&a, own);
    } else if (o->code == HOLD)
        FOR_KIND(run->program->kind, NARROW_ALL, at_row(run, o, o->from, r, o->from_at), o->in, to->inputs,
                 part->slots[own] * to->inputs_width);
    else
        FOR_KIND(run->program->kind, convolve_row, run, o, part, r);
}

/* An operation of rows, with row `r`. */
static void run_row(const Run *run, const Operation *o, int64_t r, float *own) {
    const Program *program = run->program;
    const Call *call = run->call;
    const int64_t rows = call->rows;
    if (o->code <= ROUND && o->experts) {
        const int64_t number = run->routes.segment_of[r];
        const Segment *segment = run->routes.segments + number;
        prepare_row(o, at_row(run, o, o->from, r, o->from_at), r - segment->first, segment->rows,
                    prepared_at(run, o->code, o, number));
        return;
    }
    const float *x = at_row(run, o, o->from, r, o->from_at);
    const float *with = o->with < 0 ? NULL : at_row(run, o, o->with, r, o->with_at);
    float *y = at_row(run, o, o->to, r, o->to_at);
    switch (o->code) {
    case NORM:
        for (int64_t head = 0; head < o->heads; head++)
            normalise(x + head * o->in, o->weights, o->in, o->factor, o->eps, o->how, y + head * o->in,
                      norm_room(o->in), own);
        break;
    case DIVIDE:
    case PAIR:
    case ROUND:
        prepare_row(o, x, r, rows, run->prepared);
        break;
    case TURN: {
        Turn a = {run->registers[o->from] + o->from_at, call->cosine, call->sine, run->registers[o->to], rows,
                  o->heads, o->in, call->angles, program->widths[o->from], o->in};
        turn_row(&a, r);
        break;
    }
    case STORE:
    case HOLD:
    case CONVOLVE:
        hold_row(run, o, r);
        break;
    case GATE:
        if (o->cap > 0)
            clamp_row(o, x, with, y);
        else
            flowspec_function(x, o->in, o->how, with, y);
        break;
    case MULTIPLY:
        for (int64_t i = 0; i < o->in; i++)
            y[i] = x[i] * with[i];
        break;
    case SCALE:
        scale_row(run, o, r, y);
        break;
    case LOOK_UP:
        if (o->how)
            flowspec_packed_rows(o->weights, o->kind, o->in, call->tokens + r, 1, y);
        else
            FOR_KIND(o->kind, WIDEN_ALL, o->weights, call->tokens[r] * o->in, o->in, y);
        break;
    case LOAD:
        load_row(run, o, call->hidden, o->in, r);
        break;
    case LOAD_EMBEDDING:
        load_row(run, o, call->embedding, call->between_embeddings, r);
        break;
    case LEAVE:
        FOR_KIND(program->kind, NARROW_ALL, x, o->in, call->hidden, r * o->in);
        break;
    case CARRY:
        FOR_KIND(o->kind, NARROW_ALL, x, o->in, call->going, r * call->between_going + o->to_at);
        break;
    case NARROW:
        for (int64_t i = 0; i < o->in; i++)
            y[i] = rounded_one(y[i], program->kind);
        break;
    case ADD:
        for (int64_t i = 0; i < o->in; i++)
            y[i] += x[i] * o->factor;
        break;
    case CHOOSE:
        choose_row(run, o, r, own);
        break;
    case GATHER:
        memcpy(y, run->registers[o->from] + run->routes.row_of[r] / program->chosen * o->in, sizeof(float) * o->in);
        break;
    case MIX:
        mix_row(run, o, r);
        break;
    case CLIP: /* what is no number stays so */
        for (int64_t i = 0; i < o->in; i++)
            y[i] = y[i] > o->cap ? o->cap : y[i] < -o->cap ? -o->cap : y[i];
        break;
    default:
        copy_row(run, o, r, y);
    }
}

/* The router's logits of a thread's experts. */
static void run_halves(const Run *run, const Operation *o, int thread, float *own) {
    const int64_t rows = run->call->rows, half = half_room(o->in);
    const float *weights = o->weights;
    for (int64_t i = o->out * thread / run->threads; i < o->out * (thread + 1) / run->threads; i++)
        for (int64_t r = 0; r < rows; r++) {
            float found = halves_product(at_row(run, o, o->from, r, o->from_at), weights + i * o->in, o->in, half, own);
            run->sums[r * o->out + i] = o->bias == NULL ? found : found + o->bias[i];
        }
}

/* A thread's outputs of a product of `rows` from row `first` on, which are `prepared`. */
static void run_outputs(const Run *run, const Operation *o, int thread, Blocks *own, const Segment *of,
                        const char *prepared) {
    const int64_t rows = of->rows, width = width_of(run, o, o->to);
    const int64_t unit = o->code == PACKED ? PANEL : OUTPUTS_AT_ONCE, units = (o->out + unit - 1) / unit;
    int64_t begin = units * thread / run->threads * unit, end = units * (thread + 1) / run->threads * unit;
    end = end < o->out ? end : o->out;
    if (begin >= end)
        return;
    const void *weights = o->experts ? ((const void *const *)o->weights)[of->expert] : o->weights;
    float *to = at_row(run, o, o->to, of->first, o->to_at);
    if (o->code == LINEAR)
        linear_part(at_row(run, o, o->from, of->first, o->from_at), rows > ROWS_FEW ? (const float *)prepared : NULL,
                    rows, o->in, weights, o->kind, begin, end, to, width, own);
    else if (o->code == PAIRS) {
        Pairs a = {weights, to, rows, o->in, width};
        outputs_of_pairs(&a, (const uint16_t *)prepared, begin, end);
    } else {
        Packed a = {weights, rows, o->in, o->out, o->how};
        for (int64_t p = begin / PANEL; p * PANEL < end; p++)
            PANEL_PRODUCTS[o->kind](&a, (const Rounded *)prepared, p, to, width);
    }
    const float *bias = o->bias == NULL ? NULL : o->bias + (o->experts ? of->expert * width : 0);
    for (int64_t r = 0; r < rows && bias != NULL; r++)
        for (int64_t i = begin; i < end; i++)
            to[r * width + i] += bias[i];
}

/* Of all rows, or of each expert with its own, whose preparation is the operation before those of its kind. */
static void run_products(const Run *run, const Operation *o, int thread, Blocks *own) {
    static const int32_t PREPARED_BY[] = {[LINEAR] = DIVIDE, [PAIRS] = PAIR, [PACKED] = ROUND};
    if (!o->experts) {
        run_outputs(run, o, thread, own, &(Segment){0, run->call->rows, 0}, run->prepared);
        return;
    }
    for (int64_t s = 0; s < *run->routes.count; s++)
        run_outputs(run, o, thread, own, run->routes.segments + s, prepared_at(run, PREPARED_BY[o->code], o, s));
}

/* A thread's units of attention. */
static void run_attention(const Run *run, const Operation *o, int thread, char *own) {
    int64_t turn = 0;
    for (int64_t p = 0; p < run->call->parts_count; p++) {
        Attention a = attention_of(run, o, run->call->parts + p);
        const Chunks chunks = chunks_of(&a);
        float *room = (float *)(own + ALIGNED(seen_bytes(&chunks)));
        int64_t looked = -1;
        for (int64_t unit = 0; unit < chunks.chunks * a.kv_heads; unit++, turn++) {
            if (turn % run->threads != thread)
                continue;
            if (unit / a.kv_heads != looked)
                look_chunk(&a, &chunks, looked = unit / a.kv_heads, own);
            attend_unit(&a, &chunks, unit, own, room);
        }
    }
}

/* A thread's nodes of steps of states. */
static void run_recalls(const Run *run, const Operation *o, int thread, float *own) {
    int64_t turn = 0;
    for (int64_t p = 0; p < run->call->parts_count; p++) {
        const Delta to = delta_of(run, o, p);
        for (int64_t n = 0; n < run->call->parts[p].nodes; n++, turn++)
            if (turn % run->threads == thread)
                FOR_KIND(run->program->kind, recall_row, o, run->call->parts + p, &to, n, own);
    }
}

/* A thread's heads of the steps, and what rows read there. */
static void run_steps(const Run *run, const Operation *o, int thread) {
    int64_t turn = 0;
    for (int64_t p = 0; p < run->call->parts_count; p++) {
        const Delta a = delta_of(run, o, p);
        for (int64_t head = 0; head < a.heads; head++, turn++) {
            if (turn % run->threads != thread)
                continue;
            head_steps(&a, head);
        }
    }
}

static void run_thread(const Run *run, int thread) {
    char *own = run->own + thread * run->own_bytes;
    for (int64_t i = 0; i < run->program->count; i++) {
        const Operation *o = run->program->operations + i;
        if (o->waits && run->threads > 1) {
#ifdef _OPENMP
#pragma omp barrier
#endif
        }
        if (o->code == ATTEND)
            run_attention(run, o, thread, own);
        else if (o->code >= LINEAR && o->code <= PACKED)
            run_products(run, o, thread, (Blocks *)own);
        else if (o->code == HALVES)
            run_halves(run, o, thread, (float *)own);
        else if (o->code == RECALL)
            run_recalls(run, o, thread, (float *)own);
        else if (o->code == STEP_STATES)
            run_steps(run, o, thread);
        else if (o->code == SORT && thread == 0)
            sort_choices(run);
        else if (o->code != SORT)
            for (int64_t r = thread; r < run->call->rows * o->spread; r += run->threads)
                run_row(run, o, r, (float *)own);
    }
}

/* Runs a program. Returns 0, or how many bytes of room it needs where it was lent less, and nothing was done. */
int64_t flowspec_run(const Program *program, const Call *call) {
    Run run = {.program = program, .call = call};
    run.threads = worthwhile(call->threads, call->rows * program->products);
    run.bytes = lay_out(&run);
    if (run.bytes > call->room_bytes)
        return run.bytes;
#ifdef _OPENMP
    if (run.threads > 1) {
#pragma omp parallel num_threads(run.threads)
        {
#pragma omp single
            run.threads = omp_get_num_threads(); /* there may be fewer than were asked for */
            run_thread(&run, omp_get_thread_num());
        }
        return 0;
    }
#endif
    run.threads = 1;
    run_thread(&run, 0);
    return 0;
}
