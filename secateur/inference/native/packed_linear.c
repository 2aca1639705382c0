/* y = x W^T + b for a packed weight W and a few rows of x, called through ctypes by secateur/inference/cpu.py.

   W has a bit per position (1: a value is stored), the stored values in row order and, for int8, a scale per row. A row
   is read in blocks of 2048 columns. The values of a block are converted to what the level computes in (into a buffer on
   the stack, or read in place if they need no conversion), expanded to their columns and multiplied. Zeros are expanded
   too, so that inf and NaN in x give NaN as they do in a dense layer. Sums are fp32, in an order of their own.

   Nothing but libc is needed: threads are those of the OpenMP runtime that torch has already loaded, started through
   its GOMP_parallel, whose address the caller passes. */

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum dtype { FLOAT32, BFLOAT16, FLOAT16, INT8 };
enum level { PORTABLE, AVX2, AVX512, AVX512_BF16 };
enum outcome { OK, NO_MEMORY, BROKEN };

#define MOST_INPUTS 8 /* rows of x in one pass over the weight */
#define BLOCK 2048    /* columns of a block: long, as a block begins by waiting for the buffer's stores */
#define SLACK 32      /* elements that a level may read beyond the values of a block */
#ifndef SECATEUR_SOURCE
#define SECATEUR_SOURCE "" /* setup.py passes a hash of this file */
#endif
#define MINE static inline __attribute__((always_inline))

typedef struct {
    const void *x;     /* as the level computes in, rows of `stride` elements, zero from `cols` on */
    int64_t stride;    /* a multiple of 64 */
    const uint8_t *mask;
    const void *values;
    const int64_t *offsets; /* first value of each row */
    const float *scales;
    const void *bias;
    void *y;
    int64_t rows, cols, inputs, nonzeros;
    enum dtype x_dtype, value_dtype;
    int64_t rows_at_once;
    _Atomic int64_t next; /* first row that no thread has taken */
    _Atomic int broken;   /* a row whose mask and offsets disagree */
    void (*rows_of)(void *job, int64_t first, int64_t last);
} Job;

typedef void (*Parallel)(void (*)(void *), void *, unsigned threads, unsigned flags); /* the type of GOMP_parallel */

MINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

MINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

MINE float from_bf16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

MINE uint16_t to_bf16(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN, which rounding could turn into infinity */
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float from_fp16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    float size = from_bits(rest << 13) * 0x1p112f; /* the exponents' difference; subnormals become normal */
    return from_bits(to_bits(size) | sign);
}

static uint16_t to_fp16(float value) {
    uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7e00;
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to 65536 or more */
    if (size < 0x38800000) { /* subnormal: let an addition round to a multiple of 2^-24 */
        return (uint16_t)(sign | (to_bits(from_bits(size) + 0.5f) - to_bits(0.5f)));
    }
    return (uint16_t)(sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13));
}

static float read_float(const void *from, int64_t index, enum dtype dtype) {
    switch (dtype) {
    case FLOAT32: return ((const float *)from)[index];
    case BFLOAT16: return from_bf16(((const uint16_t *)from)[index]);
    case FLOAT16: return from_fp16(((const uint16_t *)from)[index]);
    default: return ((const int8_t *)from)[index];
    }
}

static void write_float(void *to, int64_t index, float value, enum dtype dtype) {
    if (dtype == FLOAT32) ((float *)to)[index] = value;
    else ((uint16_t *)to)[index] = dtype == BFLOAT16 ? to_bf16(value) : to_fp16(value);
}

MINE int64_t width_of(enum dtype dtype) { return dtype == FLOAT32 ? 4 : dtype == INT8 ? 1 : 2; }

/* 64 bits of a row's mask from `byte` on, zero beyond its end. */
MINE uint64_t mask_at(const uint8_t *mask, int64_t byte, int64_t bytes) {
    uint64_t bits = 0;
    if (byte + 8 <= bytes) memcpy(&bits, mask + byte, 8);
    else if (byte < bytes) memcpy(&bits, mask + byte, (size_t)(bytes - byte));
    return bits;
}

MINE void write_row(const Job *job, int64_t row, const float *sums, int inputs) {
    float scale = job->scales ? job->scales[row] : 1.0f;
    for (int i = 0; i < inputs; i++) {
        float sum = sums[i] * scale;
        if (job->bias) sum += read_float(job->bias, row, job->x_dtype);
        write_float(job->y, i * job->rows + row, sum, job->x_dtype);
    }
}

/* A level is two functions: CONVERT turns values into what it computes in, and BLOCK_OF adds the products of a block of
   `bytes` mask bytes to `sums` and returns how many values those were. This makes of them the function of a range of rows.
   IN_PLACE: the dtype of values that need no conversion. They are copied all the same near the end of the values, where
   reading SLACK more would be outside of them. */
#define ROWS(NAME, TARGET, ELEMENT, SUM, IN_PLACE, CONVERT, COUNT, BLOCK_OF, TOTAL)                                    \
    TARGET MINE void NAME##_n(Job *job, int64_t first, int64_t last, const int n) {                              \
        ELEMENT buffer[BLOCK + SLACK] __attribute__((aligned(64)));                                                    \
        const int64_t bytes = (job->cols + 7) / 8, width = width_of(job->value_dtype);                                 \
        const char *end = (const char *)job->values + job->nonzeros * width;                                           \
        for (int64_t row = first; row < last; row++) {                                                                 \
            const uint8_t *mask = job->mask + row * bytes;                                                             \
            const int64_t start = job->offsets[row], stop = job->offsets[row + 1];                                     \
            if (start < 0 || start > stop || stop > job->nonzeros) {                                                   \
                job->broken = 1;                                                                                       \
                return;                                                                                                \
            }                                                                                                          \
            const char *values = (const char *)job->values + start * width;                                            \
            const ELEMENT *x = job->x;                                                                                 \
            SUM sums[MOST_INPUTS];                                                                                     \
            memset(sums, 0, sizeof(sums[0]) * (size_t)n);                                                              \
            for (int64_t byte = 0; byte < bytes; byte += BLOCK / 8, x += BLOCK) {                                      \
                const int64_t here = bytes - byte < BLOCK / 8 ? bytes - byte : BLOCK / 8;                              \
                const ELEMENT *from = (const ELEMENT *)values;                                                         \
                if (job->value_dtype != IN_PLACE || end - values < (BLOCK + SLACK) * width) {                          \
                    const int64_t count = COUNT(mask + byte, here), left = (end - values) / width;                     \
                    CONVERT(values, count < left ? count : left < 0 ? 0 : left, job->value_dtype, buffer);                            \
                    from = buffer;                                                                                     \
                }                                                                                                      \
                if (here == BLOCK / 8) values += width * BLOCK_OF(x, job->stride, mask + byte, BLOCK / 8, from, sums, n); \
                else values += width * BLOCK_OF(x, job->stride, mask + byte, here, from, sums, n);                     \
            }                                                                                                          \
            if (values != (const char *)job->values + stop * width) job->broken = 1;                                   \
            float totals[MOST_INPUTS];                                                                                 \
            for (int i = 0; i < n; i++) totals[i] = TOTAL(&sums[i]);                                                   \
            write_row(job, row, totals, n);                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    TARGET static void NAME(void *given, int64_t first, int64_t last) {                                                \
        Job *job = given;                                                                                              \
        switch (job->inputs) { /* constants, so that sums are registers */                                             \
        case 1: NAME##_n(job, first, last, 1); break;                                                                  \
        case 2: NAME##_n(job, first, last, 2); break;                                                                  \
        case 3: NAME##_n(job, first, last, 3); break;                                                                  \
        case 4: NAME##_n(job, first, last, 4); break;                                                                  \
        case 5: NAME##_n(job, first, last, 5); break;                                                                  \
        case 6: NAME##_n(job, first, last, 6); break;                                                                  \
        case 7: NAME##_n(job, first, last, 7); break;                                                                  \
        default: NAME##_n(job, first, last, 8);                                                                        \
        }                                                                                                              \
    }

/* --- portable ----------------------------------------------------------------------------------------------------- */

typedef struct { float lane[8]; } Lanes;

MINE int64_t ones(const uint8_t *mask, int64_t bytes) {
    int64_t count = 0;
    for (int64_t byte = 0; byte < bytes; byte += 8) count += __builtin_popcountll(mask_at(mask, byte, bytes));
    return count;
}

static void to_floats(const void *values, int64_t count, enum dtype dtype, float *to) {
    for (int64_t i = 0; i < count; i++) to[i] = read_float(values, i, dtype);
}

MINE int64_t portable_block(const float *x, int64_t stride, const uint8_t *mask, int64_t bytes, const float *from,
                         Lanes *sums, const int n) {
    const float *begin = from;
    for (int64_t byte = 0; byte < bytes; byte++) {
        float weight[8];
        uint32_t bits = mask[byte];
        for (int lane = 0; lane < 8; lane++, bits >>= 1) {
            weight[lane] = from_bits(to_bits(*from) & -(bits & 1)); /* a branch would be mispredicted half of the time */
            from += bits & 1;
        }
        for (int i = 0; i < n; i++)
            for (int lane = 0; lane < 8; lane++) sums[i].lane[lane] += weight[lane] * x[i * stride + byte * 8 + lane];
    }
    return from - begin;
}

MINE float portable_total(const Lanes *sums) {
    const float *s = sums->lane;
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

ROWS(portable_rows, , float, Lanes, FLOAT32, to_floats, ones, portable_block, portable_total)

#if defined(__x86_64__)
#include <immintrin.h>

/* --- AVX2: eight columns at a time, moved to their places by a permutation looked up for the mask's byte ------------ */

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c,popcnt")))

/* A byte per lane: the value that goes there, with the top bit set where the mask has a one. */
static uint64_t places[256];

__attribute__((constructor)) static void fill_places(void) {
    for (int mask = 0; mask < 256; mask++) {
        uint64_t found = 0, next = 0;
        for (int lane = 0; lane < 8; lane++)
            if (mask >> lane & 1) found |= (0x80 | next++) << (8 * lane);
        places[mask] = found;
    }
}

typedef struct { __m256 part[4]; } Four256;

#define PARTS(n) ((n) == 1 ? 4 : (n) <= 3 ? 2 : 1) /* independent sums of an input, to hide the latency of adding */

TARGET_AVX2 MINE int64_t ones_fast(const uint8_t *mask, int64_t bytes) {
    int64_t count = 0;
    for (int64_t byte = 0; byte < bytes; byte += 8) count += __builtin_popcountll(mask_at(mask, byte, bytes));
    return count;
}

TARGET_AVX2 MINE void convert_avx2(const void *values, int64_t count, enum dtype dtype, float *to) {
    int64_t i = 0;
    if (dtype == BFLOAT16) {
        for (; i + 8 <= count; i += 8) {
            __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)values + i));
            _mm256_store_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
        }
    } else if (dtype == FLOAT16) {
        for (; i + 8 <= count; i += 8) {
            __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)values + i));
            _mm256_store_ps(to + i, _mm256_cvtph_ps(bits));
        }
    } else if (dtype == INT8) {
        for (; i + 8 <= count; i += 8) {
            __m128i bytes = _mm_loadl_epi64((const __m128i *)((const int8_t *)values + i));
            _mm256_store_ps(to + i, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
        }
    }
    for (; i < count; i++) to[i] = read_float(values, i, dtype);
}

TARGET_AVX2 MINE int64_t block_avx2(const float *x, int64_t stride, const uint8_t *mask, int64_t bytes,
                                    const float *from, Four256 *sums, const int n) {
    const float *begin = from;
    __m256 sum[MOST_INPUTS][4];
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sum[i][part] = sums[i].part[part];
    for (int64_t byte = 0; byte < bytes; byte += 4) {
        uint32_t bits = (uint32_t)mask_at(mask, byte, bytes);
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++, bits >>= 8) {
            __m256i place = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&places[bits & 255]));
            __m256 moved = _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), place);
            __m256 weight = _mm256_and_ps(moved, _mm256_castsi256_ps(_mm256_srai_epi32(place, 31)));
            from += __builtin_popcount(bits & 255);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) {
                __m256 *to = &sum[i][part % PARTS(n)];
                *to = _mm256_fmadd_ps(weight, _mm256_loadu_ps(x + i * stride + byte * 8 + part * 8), *to);
            }
        }
    }
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sums[i].part[part] = sum[i][part];
    return from - begin;
}

TARGET_AVX2 MINE float total_avx2(const Four256 *sums) {
    const __m256 *s = sums->part;
    Lanes lanes;
    _mm256_storeu_ps(lanes.lane, _mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])));
    return portable_total(&lanes);
}

ROWS(avx2_rows, TARGET_AVX2, float, Four256, FLOAT32, convert_avx2, ones_fast, block_avx2, total_avx2)

/* --- AVX-512: sixteen columns at a time by vpexpandd ----------------------------------------------------------------- */

#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,popcnt,bmi2")))

typedef struct { __m512 part[4]; } Four;

TARGET_AVX512 MINE void convert_avx512(const void *values, int64_t count, enum dtype dtype, float *to) {
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 there = count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        __m512 found;
        if (dtype == BFLOAT16) {
            __m256i bits = _mm256_maskz_loadu_epi16(there, (const uint16_t *)values + i);
            found = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        } else if (dtype == FLOAT16) {
            found = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, (const uint16_t *)values + i));
        } else if (dtype == INT8) {
            __m128i bytes = _mm_maskz_loadu_epi8(there, (const int8_t *)values + i);
            found = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
        } else {
            found = _mm512_maskz_loadu_ps(there, (const float *)values + i);
        }
        _mm512_store_ps(to + i, found);
    }
}

TARGET_AVX512 MINE int64_t block_avx512(const float *x, int64_t stride, const uint8_t *mask, int64_t bytes,
                                        const float *from, Four *sums, const int n) {
    const float *begin = from;
    __m512 sum[MOST_INPUTS][4];
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sum[i][part] = sums[i].part[part];
    for (int64_t byte = 0; byte < bytes; byte += 8) {
        uint64_t bits = mask_at(mask, byte, bytes);
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++, bits >>= 16) {
            __m512 weight = _mm512_maskz_expand_ps((__mmask16)bits, _mm512_loadu_ps(from));
            from += __builtin_popcount((uint16_t)bits);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) {
                __m512 *to = &sum[i][part % PARTS(n)];
                *to = _mm512_fmadd_ps(weight, _mm512_loadu_ps(x + i * stride + byte * 8 + part * 16), *to);
            }
        }
    }
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sums[i].part[part] = sum[i][part];
    return from - begin;
}

TARGET_AVX512 MINE float total_avx512(const Four *sums) {
    const __m512 *s = sums->part;
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(s[0], s[1]), _mm512_add_ps(s[2], s[3])));
}

ROWS(avx512_rows, TARGET_AVX512, float, Four, FLOAT32, convert_avx512, ones_fast, block_avx512, total_avx512)

/* --- AVX-512 with VBMI2 and BF16: thirty-two columns at a time by vpexpandw, x stays bf16 ----------------------------- */

#define TARGET_BF16                                                                                                    \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx512vpopcntdq,avx512bf16,avx2,fma,f16c,popcnt,bmi2")))

/* Where lane i of sixteen takes its value from: the number of ones below bit i. On Zen 4, where an
   expansion takes 5 cycles, this and a permutation are faster (docs/LOG.md). */
TARGET_BF16 MINE __m512i places16(uint16_t bits) {
    const __m512i below = _mm512_set_epi32(0x7fff, 0x3fff, 0x1fff, 0xfff, 0x7ff, 0x3ff, 0x1ff, 0xff, 0x7f, 0x3f, 0x1f,
                                           0xf, 7, 3, 1, 0);
    return _mm512_popcnt_epi32(_mm512_and_si512(_mm512_set1_epi32(bits), below));
}

/* The same for thirty-two: lane 2i and 2i + 1 are the halves of dword i. */
TARGET_BF16 MINE __m512i places32(uint32_t bits) {
    __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), one = _mm512_set1_epi32(1);
    __m512i even = _mm512_sub_epi32(_mm512_sllv_epi32(one, _mm512_add_epi32(lane, lane)), one);
    __m512i odd = _mm512_or_si512(_mm512_add_epi32(even, even), one), all = _mm512_set1_epi32((int)bits);
    __m512i low = _mm512_popcnt_epi32(_mm512_and_si512(all, even)), high = _mm512_popcnt_epi32(_mm512_and_si512(all, odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

TARGET_BF16 MINE int64_t block_popcnt(const float *x, int64_t stride, const uint8_t *mask, int64_t bytes,
                                      const float *from, Four *sums, const int n) {
    const float *begin = from;
    __m512 sum[MOST_INPUTS][4];
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sum[i][part] = sums[i].part[part];
    for (int64_t byte = 0; byte < bytes; byte += 8) {
        uint64_t bits = mask_at(mask, byte, bytes);
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++, bits >>= 16) {
            __mmask16 here = (__mmask16)bits;
            __m512 weight = _mm512_maskz_permutexvar_ps(here, places16(here), _mm512_loadu_ps(from));
            from += __builtin_popcount(here);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) {
                __m512 *to = &sum[i][part % PARTS(n)];
                *to = _mm512_fmadd_ps(weight, _mm512_loadu_ps(x + i * stride + byte * 8 + part * 16), *to);
            }
        }
    }
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sums[i].part[part] = sum[i][part];
    return from - begin;
}

ROWS(popcnt_rows, TARGET_BF16, float, Four, FLOAT32, convert_avx512, ones_fast, block_popcnt, total_avx512)

/* bf16 is copied; int8 is exact in bf16. */
TARGET_BF16 MINE void convert_bf16(const void *values, int64_t count, enum dtype dtype, uint16_t *to) {
    for (int64_t i = 0; i < count; i += 32) {
        __mmask32 there = count - i >= 32 ? 0xffffffff : (__mmask32)((1u << (count - i)) - 1);
        __m512i found;
        if (dtype == BFLOAT16) {
            found = _mm512_maskz_loadu_epi16(there, (const uint16_t *)values + i);
        } else {
            __m256i bytes = _mm256_maskz_loadu_epi8(there, (const int8_t *)values + i);
            __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
            __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
            found = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
        _mm512_store_si512(to + i, found);
    }
}

TARGET_BF16 MINE int64_t block_bf16(const uint16_t *x, int64_t stride, const uint8_t *mask, int64_t bytes,
                                    const uint16_t *from, Four *sums, const int n) {
    const uint16_t *begin = from;
    __m512 sum[MOST_INPUTS][4];
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sum[i][part] = sums[i].part[part];
    for (int64_t byte = 0; byte < bytes; byte += 16) {
        uint64_t words[2] = {mask_at(mask, byte, bytes), mask_at(mask, byte + 8, bytes)};
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            uint32_t bits = (uint32_t)(words[part / 2] >> (part % 2 * 32));
            __m512i weight = _mm512_loadu_si512(from); /* by turns, so that both pipes are busy */
            if (part % 2) weight = _mm512_maskz_expand_epi16(bits, weight);
            else weight = _mm512_maskz_permutexvar_epi16(bits, places32(bits), weight);
            from += __builtin_popcount(bits);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) {
                __m512 *to = &sum[i][part % PARTS(n)];
                __m512i inputs = _mm512_loadu_si512(x + i * stride + byte * 8 + part * 32);
                *to = _mm512_dpbf16_ps(*to, (__m512bh)weight, (__m512bh)inputs);
            }
        }
    }
    for (int i = 0; i < n; i++)
        for (int part = 0; part < PARTS(n); part++) sums[i].part[part] = sum[i][part];
    return from - begin;
}

ROWS(bf16_rows, TARGET_BF16, uint16_t, Four, BFLOAT16, convert_bf16, ones_fast, block_bf16, total_avx512)

#endif

/* --- entry points ------------------------------------------------------------------------------------------------------ */

/* The best level of this processor. */
int secateur_best_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2");
    if (avx512 && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512bf16")) return AVX512_BF16;
    if (avx512) return AVX512;
    if (avx2) return AVX2;
#endif
    return PORTABLE;
}

static void take_rows(void *given) {
    Job *job = given;
    for (;;) {
        int64_t first = atomic_fetch_add(&job->next, job->rows_at_once), last = first + job->rows_at_once;
        if (first >= job->rows) return;
        job->rows_of(job, first, last < job->rows ? last : job->rows);
    }
}

/* x for the level: in place where it can be read so, else a copy that the caller frees. NULL: no memory. */
static void *prepare_x(const void *x, int64_t inputs, int64_t cols, enum dtype dtype, int as_bf16, int64_t *stride) {
    *stride = (cols + 127) / 128 * 128;
    if (*stride == cols && dtype == (as_bf16 ? BFLOAT16 : FLOAT32)) return (void *)x;
    int64_t width = as_bf16 ? 2 : 4;
    char *copy = calloc((size_t)(inputs * *stride), (size_t)width);
    for (int64_t i = 0; copy && i < inputs; i++) {
        if (as_bf16 || dtype == FLOAT32) memcpy(copy + i * *stride * width, (const char *)x + i * cols * width, (size_t)(cols * width));
        else for (int64_t col = 0; col < cols; col++) ((float *)copy)[i * *stride + col] = read_float(x, i * cols + col, dtype);
    }
    return copy;
}

static void run(Job *job, int threads, Parallel parallel) {
    job->rows_at_once = job->rows / (threads * 8) + 1;
    if (threads > 1 && parallel) parallel(take_rows, job, (unsigned)threads, 0);
    else take_rows(job);
}

/* What this library was compiled from, for the caller to compare with the source it has. */
const char *secateur_source(void) { return SECATEUR_SOURCE; }

/* x is [inputs, cols], y [inputs, rows] and bias [rows], all contiguous and of `x_dtype`; values are of `x_dtype` or int8,
   then with scales. `parallel` is GOMP_parallel, or NULL to use this thread alone. Returns OK, NO_MEMORY, or BROKEN if
   mask, offsets and number of values disagree; y is undefined then, but nothing is read or written out of bounds. */
int secateur_packed_linear(const void *x, const uint8_t *mask, const void *values, const int64_t *offsets,
                           const float *scales, const void *bias, void *y, int64_t inputs, int64_t rows, int64_t cols,
                           int64_t nonzeros, int x_dtype, int value_dtype, int level, int threads, Parallel parallel) {
    int as_bf16 = level == AVX512_BF16 && x_dtype == BFLOAT16, broken = 0;
    int64_t stride, width = width_of((enum dtype)x_dtype), x_width = as_bf16 ? 2 : 4;
    void *prepared = prepare_x(x, inputs, cols, (enum dtype)x_dtype, as_bf16, &stride);
    if (!prepared) return NO_MEMORY;
    void (*rows_of)(void *, int64_t, int64_t) = portable_rows;
#if defined(__x86_64__)
    if (as_bf16) rows_of = bf16_rows;
    else if (level == AVX512_BF16) rows_of = popcnt_rows;
    else if (level == AVX512) rows_of = avx512_rows;
    else if (level == AVX2) rows_of = avx2_rows;
#endif
    for (int64_t from = 0; from < inputs; from += MOST_INPUTS) {
        Job job = {
            .x = (const char *)prepared + from * stride * x_width, .stride = stride, .mask = mask, .values = values,
            .offsets = offsets, .scales = scales, .bias = bias, .y = (char *)y + from * rows * width, .rows = rows,
            .cols = cols, .inputs = inputs - from < MOST_INPUTS ? inputs - from : MOST_INPUTS, .nonzeros = nonzeros,
            .x_dtype = (enum dtype)x_dtype, .value_dtype = (enum dtype)value_dtype, .rows_of = rows_of,
        };
        run(&job, threads, parallel);
        broken |= job.broken;
    }
    if (prepared != x) free(prepared);
    return broken ? BROKEN : OK;
}

#define UNPACK(TYPE, VALUE)                                                                                            \
    {                                                                                                                  \
        TYPE *to = (TYPE *)job->y + row * job->cols;                                                                   \
        memset(to, 0, sizeof(TYPE) * (size_t)job->cols);                                                               \
        for (int64_t byte = 0; byte < bytes; byte += 8) {                                                              \
            for (uint64_t bits = mask_at(mask, byte, bytes); bits; bits &= bits - 1, place++) {                        \
                int64_t col = byte * 8 + __builtin_ctzll(bits);                                                        \
                if (place >= stop || col >= job->cols) {                                                               \
                    job->broken = 1;                                                                                   \
                    break;                                                                                             \
                }                                                                                                      \
                to[col] = VALUE;                                                                                       \
            }                                                                                                          \
        }                                                                                                              \
    }

static void unpack_rows(void *given, int64_t first, int64_t last) {
    Job *job = given;
    const int64_t bytes = (job->cols + 7) / 8;
    for (int64_t row = first; row < last; row++) {
        int64_t place = job->offsets[row], stop = job->offsets[row + 1];
        const uint8_t *mask = job->mask + row * bytes;
        if (place < 0 || place > stop || stop > job->nonzeros) {
            job->broken = 1;
            return;
        }
        const float scale = job->scales ? job->scales[row] : 1.0f;
        const int8_t *steps = job->values;
        if (job->scales && job->x_dtype == FLOAT32) UNPACK(float, scale * steps[place])
        else if (job->scales && job->x_dtype == BFLOAT16) UNPACK(uint16_t, to_bf16(scale * steps[place]))
        else if (job->scales) UNPACK(uint16_t, to_fp16(scale * steps[place]))
        else if (job->value_dtype == FLOAT32) UNPACK(uint32_t, ((const uint32_t *)job->values)[place])
        else UNPACK(uint16_t, ((const uint16_t *)job->values)[place])
        if (place != stop) job->broken = 1;
    }
}

/* The dense weight [rows, cols] of `dtype`; the rest as above. */
int secateur_unpack(const uint8_t *mask, const void *values, const int64_t *offsets, const float *scales, void *weight,
                    int64_t rows, int64_t cols, int64_t nonzeros, int dtype, int threads, Parallel parallel) {
    Job job = {
        .mask = mask, .values = values, .offsets = offsets, .scales = scales, .y = weight, .rows = rows, .cols = cols,
        .nonzeros = nonzeros, .x_dtype = (enum dtype)dtype, .value_dtype = scales ? INT8 : (enum dtype)dtype,
        .rows_of = unpack_rows,
    };
    run(&job, threads, parallel);
    return job.broken ? BROKEN : OK;
}
