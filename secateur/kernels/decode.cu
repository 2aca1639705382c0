// Few inputs times a sparse weight in streams, and the dense weight of streams (decode.py has the format, decode_cuda.py
// compiles and launches this).
//
// What Triton cannot do: the inputs stay in shared memory for the whole kernel, and threads take groups of 16 entries one
// after another without regard to rows, so that every thread has work until the end and memory is read in order. A group
// gives one partial sum for each input, kept in shared memory; afterwards a warp adds up those of a row. The order of all
// sums is fixed. A block owns some shares, which are neighbouring rows with about the same number of groups, and takes
// as many at a time as it has room for the sums of.
//
// Compiled with: X, V (types of inputs and values), BITS, CELL, INPUTS (at a time), THREADS, DEPTH (groups that a thread
// reads ahead), COPIES (of the inputs in shared memory), SCALED, BIASED.
//
// On average 3.5 of a warp's threads meet in one bank when they read inputs at random columns. With copies, a thread reads
// that of its number modulo COPIES: 3.0 threads meet with 8 copies, 2 with 16.

#define FP32 0
#define BF16 1
#define FP16 2
#define INT8 3

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#ifndef ON_CPU // tests/cuda_on_cpu.h has these in C++, so that the rest is tested without a GPU
__device__ __forceinline__ uint4 read4(const void *plane, i64 group) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"((const uint4 *)plane + group));
    return words;
}

__device__ __forceinline__ u32 read1(const void *plane, i64 group) {
    u32 word;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"((const u32 *)plane + group));
    return word;
}

__device__ __forceinline__ float fp16_as_float(u32 word) { // of its low half
    float result;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(result) : "r"(word));
    return result;
}

__device__ __forceinline__ u16 rounded_to_bf16(float value) {
    u16 half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

__device__ __forceinline__ u16 rounded_to_fp16(float value) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

// In a CUDA graph a launch may begin before the one it follows has ended (compute capability 9.0 and later).
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void allow_launch_after() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#endif

#define ENTRIES 16
#define WARPS (THREADS / 32)
#define BEGIN ((1LL << 40) - 1) // of an entry of `starts`
#define CELL_COLUMNS 16
#define STEP (CELL ? CELL_COLUMNS * ENTRIES / (CELL ? CELL : 1) : 1) // columns of a group of cells
#define VALUE_WORDS (V == FP32 ? 16 : V == INT8 ? 4 : 8)
#define INDEX_WORDS (BITS / 2)
#define HALVED (COPIES > 1 && INPUTS == 1 && X != FP32) // a word has inputs of two columns, which lie `padded` apart
#define ONE (INPUTS == 1 || X != FP32 && INPUTS == 2 ? 4 : 8) // bytes of the inputs of a column
#define UNIT (COPIES * ONE) // bytes of a column in shared memory

struct Group {
    u32 value[VALUE_WORDS];
    u32 index[INDEX_WORDS];
    u32 base; // column of the first entry
};

struct Planes {
    const void *value0, *value1, *value2, *value3;
    const u32 *index0, *index1, *index2, *index3;
    const u16 *bases;
};

__device__ __forceinline__ void read_values(Group &group, const void *plane, i64 place, int number) {
    if (V == INT8) {
        group.value[number] = read1(plane, place);
        return;
    }
    uint4 words = read4(plane, place);
    group.value[4 * number % VALUE_WORDS] = words.x;
    group.value[(4 * number + 1) % VALUE_WORDS] = words.y;
    group.value[(4 * number + 2) % VALUE_WORDS] = words.z;
    group.value[(4 * number + 3) % VALUE_WORDS] = words.w;
}

__device__ __forceinline__ Group read_group(const Planes &planes, i64 place) {
    Group group;
    read_values(group, planes.value0, place, 0);
    read_values(group, planes.value1, place, 1);
    if (V == FP32 || V == INT8) {
        read_values(group, planes.value2, place, 2);
        read_values(group, planes.value3, place, 3);
    }
    group.index[0] = read1(planes.index0, place);
    group.index[1] = read1(planes.index1, place);
    if (BITS == 8) {
        group.index[2 % INDEX_WORDS] = read1(planes.index2, place);
        group.index[3 % INDEX_WORDS] = read1(planes.index3, place);
    }
    group.base = CELL ? 0 : planes.bases[place];
    return group;
}

__device__ __forceinline__ float from_half(u32 word, int high, int type) {
    if (type == BF16) return __uint_as_float(high ? word & 0xFFFF0000u : word << 16);
    return fp16_as_float(high ? word >> 16 : word);
}

// Entry k of a group; k is a constant after unrolling.
__device__ __forceinline__ float value_of(const Group &group, int k) {
    if (V == FP32) return __uint_as_float(group.value[k % VALUE_WORDS]);
    if (V == INT8) { // a byte in the low bits of 2^23 is that number
        u32 bits = __byte_perm(group.value[k / 4] ^ 0x80808080u, 0x4B000000u, 0x7440 | (k % 4));
        return __uint_as_float(bits) - 8388736.0f;
    }
    return from_half(group.value[(k / 8 * 4 + k % 4) % VALUE_WORDS], k / 4 % 2, V);
}

// Bytes in shared memory at which the inputs of each entry lie. __dp4a adds the bytes of a word that the other selects.
__device__ __forceinline__ void places_of(const Group &group, u32 *place) {
    u32 base = group.base;
#pragma unroll
    for (int word = 0; word < INDEX_WORDS; word++) {
        u32 codes = group.index[word];
        if (BITS == 8) {
#pragma unroll
            for (int k = 0; k < 4; k++)
                place[4 * word + k] = __dp4a(codes, UNIT * 0x01010101u & 0xFFFFFFFFu >> 8 * (3 - k), base);
            base = place[4 * word + 3];
            continue;
        }
        u32 even = codes & 0x0F0F0F0Fu, odd = codes >> 4 & 0x0F0F0F0Fu;
        if (!CELL) { // sums of gaps up to each entry: at most 120
            u32 sums = (even + odd) * 0x01010101u;
            even = sums - odd;
            odd = sums;
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            int cell = CELL ? (8 * word + k) / (CELL ? CELL : 1) * CELL_COLUMNS * UNIT : 0;
            place[8 * word + k] = __dp4a(k % 2 ? odd : even, (u32)UNIT << 8 * (k / 2), base ^ cell);
        }
        if (!CELL) base = place[8 * word + 7];
    }
}

// Inputs, partial sums [INPUTS, most_groups], groups at which rows begin [2, most_rows + 1].
extern __shared__ char memory[];

__device__ __forceinline__ void read_ahead(Group *ahead, const Planes &planes, int group, int end) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (group + d * THREADS < end) ahead[d] = read_group(planes, group + d * THREADS);
}

// The inputs of one column, or two of them, from shared memory.
__device__ __forceinline__ void inputs_at(u32 place, float *x) {
    if (HALVED) {
        x[0] = from_half(*(const u16 *)(memory + place), 0, X);
    } else if (INPUTS == 1) {
        x[0] = *(const float *)(memory + place);
    } else if (X == FP32) {
        float2 both = *(const float2 *)(memory + place);
        x[0] = both.x, x[1 % INPUTS] = both.y;
    } else if (INPUTS == 2) {
        u32 word = *(const u32 *)(memory + place);
        x[0] = from_half(word, 0, X), x[1 % INPUTS] = from_half(word, 1, X);
    } else {
        uint2 words = *(const uint2 *)(memory + place);
        x[0] = from_half(words.x, 0, X), x[1 % INPUTS] = from_half(words.x, 1, X);
        x[2 % INPUTS] = from_half(words.y, 0, X), x[3 % INPUTS] = from_half(words.y, 1, X);
    }
}

__device__ __forceinline__ void multiply(const Group &group, float *sum) {
    u32 place[ENTRIES];
    places_of(group, place);
    float four[INPUTS][4];
#pragma unroll
    for (int k = 0; k < ENTRIES; k++) {
        float value = value_of(group, k), x[INPUTS];
        inputs_at(place[k], x);
#pragma unroll
        for (int n = 0; n < INPUTS; n++) four[n][k % 4] = k < 4 ? value * x[n] : fmaf(value, x[n], four[n][k % 4]);
    }
#pragma unroll
    for (int n = 0; n < INPUTS; n++) sum[n] = (four[n][0] + four[n][1]) + (four[n][2] + four[n][3]);
}

__device__ __forceinline__ float x_as_float(const void *x, i64 place) {
    if (X == FP32) return ((const float *)x)[place];
    return from_half(((const u16 *)x)[place], 0, X);
}

// Where the inputs of a column are staged; it is its own inverse. The threads of a warp read the same entry of
// neighbouring groups of cells, and those have similar columns: different groups have their columns in another order, so
// that few meet in one bank.
__device__ __forceinline__ int mixed(int group) { return (group & 1) << 4 | (group >> 1 & 15); }
__device__ __forceinline__ int staged_at(int column) { return CELL ? column ^ mixed(column / STEP) : column; }

// The bits of an input; zero beyond the last column.
__device__ __forceinline__ u32 bits_of(const void *x, int number, int column, int columns, int live) {
    if (column >= columns) return 0;
    i64 place = (i64)min(number, live - 1) * columns + column;
    return X == FP32 ? ((const u32 *)x)[place] : ((const u16 *)x)[place];
}

// A word of those at a place in shared memory: an input in fp32, two inputs of 16 bits, or one of two columns.
__device__ __forceinline__ u32 word_of(const void *x, int word, int place, int columns, int padded, int live) {
    int column = staged_at(place);
    if (X == FP32) return bits_of(x, word, column, columns, live);
    if (HALVED)
        return bits_of(x, 0, column, columns, live) | bits_of(x, 0, staged_at(place + padded), columns, live) << 16;
    if (INPUTS == 1) return __float_as_uint(from_half(bits_of(x, 0, column, columns, live), 0, X));
    return bits_of(x, 2 * word, column, columns, live) | bits_of(x, 2 * word + 1, column, columns, live) << 16;
}

// The inputs of each column side by side, COPIES times. Neighbouring threads write 16 bytes each next to one another, so
// that no two of them meet in one bank.
__device__ void stage(const void *x, int columns, int padded, int live) {
    const int wide = UNIT < 16 ? 16 / UNIT : 1, pieces = UNIT < 16 ? 1 : UNIT / 16; // columns in 16 bytes, or the inverse
#pragma unroll 4
    for (int piece = threadIdx.x; piece < padded / wide * pieces; piece += THREADS) {
        u32 made[4];
#pragma unroll
        for (int word = 0; word < 4; word++) {
            int place = piece / pieces * wide + 4 * word / (16 / wide);
            made[word] = word_of(x, word % (ONE / 4), place, columns, padded, live);
        }
        ((uint4 *)memory)[piece] = {made[0], made[1], made[2], made[3]};
    }
}

// The same with one copy, reading 16 bytes of every input at a time.
__device__ void stage_in_words(const void *x, int columns, int padded, int live) {
    const int wide = X == FP32 ? 4 : 8; // columns in 16 bytes
    for (int c = threadIdx.x * wide; c < padded; c += THREADS * wide) {
        u32 read[INPUTS][4], made[wide * ONE / 4];
#pragma unroll
        for (int n = 0; n < INPUTS; n++) {
            uint4 words = {0, 0, 0, 0};
            if (c < columns) words = *(const uint4 *)((const char *)x + ((i64)min(n, live - 1) * columns + c) * 16 / wide);
            read[n][0] = words.x, read[n][1] = words.y, read[n][2] = words.z, read[n][3] = words.w;
        }
#pragma unroll
        for (int j = 0; j < wide; j++) {
            if (X == FP32) {
#pragma unroll
                for (int n = 0; n < INPUTS; n++) made[j * INPUTS + n] = read[n][j % 4];
            } else if (INPUTS == 1) {
                made[j] = __float_as_uint(from_half(read[0][j / 2], j % 2, X));
            } else {
#pragma unroll
                for (int n = 0; n < INPUTS; n += 2)
                    made[(j * INPUTS + n) / 2] =
                        __byte_perm(read[n][j / 2], read[(n + 1) % INPUTS][j / 2], j % 2 ? 0x7632 : 0x5410);
            }
        }
        uint4 *to = (uint4 *)(memory + c * ONE);
#pragma unroll
        for (int j = 0; j < wide * ONE / 16 && !CELL; j++)
            to[j] = {made[4 * j], made[4 * j + 1], made[4 * j + 2], made[4 * j + 3]};
#pragma unroll
        for (int j = 0; j < wide * ONE / 4 && CELL; j++)
            ((u32 *)(memory + staged_at(c + 4 * j / ONE) * ONE))[j % (ONE / 4)] = made[j];
    }
}

__device__ __forceinline__ void store(void *out, i64 place, float value) {
    if (X == FP32) {
        ((float *)out)[place] = value;
        return;
    }
    ((u16 *)out)[place] = X == BF16 ? rounded_to_bf16(value) : rounded_to_fp16(value);
}

// Groups at which rows begin, and the end.
__device__ __forceinline__ void read_rows(int *first, const i64 *starts, int segments, int2 begin, int2 end) {
    for (int r = threadIdx.x; r <= end.x - begin.x; r += THREADS)
        first[r] = begin.x + r == end.x ? end.y : (int)(starts[(i64)(begin.x + r) * segments] & BEGIN);
}

// Partial sums of all groups from begin to end, by all threads; `ahead` holds the first ones.
__device__ __forceinline__ void sum_groups(
    Group *ahead, const Planes &planes, float *part, int begin, int end, int padded, int in_row, int most_groups
) {
    int group = begin + threadIdx.x, number = CELL ? group % in_row : 0, step = CELL ? THREADS % in_row : 0;
    u32 copy = threadIdx.x % COPIES * ONE;
    while (group < end) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (group >= end) break;
            Group now = ahead[d];
            if (group + DEPTH * THREADS < end) ahead[d] = read_group(planes, group + DEPTH * THREADS);
            int column = CELL ? number * STEP : now.base;
            bool upper = HALVED && column >= padded;
            if (upper) column -= padded;
            now.base = UNIT * (CELL ? column ^ mixed(number) & 16 : column) + copy + 2 * upper;
            if (CELL) {
#pragma unroll
                for (int i = 0; i < INDEX_WORDS; i++) now.index[i] ^= 0x11111111u * (mixed(number) & 15);
                number += step;
                number -= number >= in_row ? in_row : 0;
            }
            float sum[INPUTS];
            multiply(now, sum);
#pragma unroll
            for (int n = 0; n < INPUTS; n++) part[n * most_groups + group - begin] = sum[n];
            group += THREADS;
        }
    }
}

struct Output {
    const float *scale;
    const void *bias;
    void *out;
    int rows, live;
};

// A warp adds up the partial sums of a row.
__device__ __forceinline__ void finish_rows(
    const float *part, const int *first, int2 begin, int2 end, const Output &to, int most_groups
) {
    int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < end.x - begin.x; r += WARPS) {
        int from = first[r] - begin.y, until = first[r + 1] - begin.y, row = begin.x + r;
        float sum[INPUTS];
#pragma unroll
        for (int n = 0; n < INPUTS; n++) {
            sum[n] = 0.0f;
            for (int i = from + lane; i < until; i += 32) sum[n] += part[n * most_groups + i];
        }
#pragma unroll
        for (int far = 16; far; far /= 2)
#pragma unroll
            for (int n = 0; n < INPUTS; n++) sum[n] += __shfl_xor_sync(0xFFFFFFFFu, sum[n], far);
#pragma unroll
        for (int n = 0; n < INPUTS; n++) {
            if (lane != n || n >= to.live) continue;
            if (SCALED) sum[n] *= to.scale[row];
            if (BIASED) sum[n] += x_as_float(to.bias, row);
            store(to.out, (i64)n * to.rows + row, sum[n]);
        }
    }
}

// Before `wait_for_launch_before` only the weight is read, which no launch before this one has written.
extern "C" __global__ void __launch_bounds__(THREADS) decode(
    const void *x, const void *value0, const void *value1, const void *value2, const void *value3, const u32 *index0,
    const u32 *index1, const u32 *index2, const u32 *index3, const u16 *bases, const i64 *starts, const int2 *shares,
    const float *scale, const void *bias, void *out, int rows, int columns, int padded, int segments, int inputs,
    int number, int together, int in_row, int aligned, int most_groups, int most_rows
) {
    Planes planes = {value0, value1, value2, value3, index0, index1, index2, index3, bases};
    float *part = (float *)(memory + padded * UNIT);
    int *first = (int *)(part + INPUTS * most_groups), *first_next = first + most_rows + 1;
    int given = blockIdx.y * INPUTS, live = min(INPUTS, inputs - given), bytes = X == FP32 ? 4 : 2;
    Output to = {scale, bias, (char *)out + (i64)given * rows * bytes, rows, live};
    int share = (i64)blockIdx.x * number / gridDim.x, last = (i64)(blockIdx.x + 1) * number / gridDim.x;
    int upto = min(share + together, last);
    int2 begin = shares[share], end = shares[upto];
    Group ahead[DEPTH];
    read_ahead(ahead, planes, begin.y + threadIdx.x, end.y);
    read_rows(first, starts, segments, begin, end);
    allow_launch_after();
    wait_for_launch_before();
    x = (const char *)x + (i64)given * columns * bytes;
    if (COPIES == 1 && aligned) stage_in_words(x, columns, padded, live);
    else stage(x, columns, padded, live);
    __syncthreads();
    while (true) {
        sum_groups(ahead, planes, part, begin.y, end.y, padded, in_row, most_groups);
        int2 next = end;
        bool more = upto < last;
        if (more) { // loads are under way while rows are finished
            upto = min(upto + together, last);
            next = shares[upto];
            read_ahead(ahead, planes, end.y + threadIdx.x, next.y);
            read_rows(first_next, starts, segments, end, next);
        }
        __syncthreads();
        finish_rows(part, first, begin, end, to, most_groups);
        if (!more) break;
        __syncthreads();
        begin = end, end = next;
        int *free = first;
        first = first_next, first_next = free;
    }
}

// An entry is zero where it only bridges a gap or fills a group; the place may be that of another entry.
__device__ __forceinline__ void put_entries(const Group &group, char *row, float scale) {
    u32 place[ENTRIES];
    places_of(group, place);
#pragma unroll
    for (int k = 0; k < ENTRIES; k++) {
        int column = place[k] / UNIT;
        if (V == INT8) {
            float value = value_of(group, k);
            if (value != 0.0f) store(row, column, value * scale);
        } else if (V == FP32) {
            if (group.value[k % VALUE_WORDS]) ((u32 *)row)[column] = group.value[k % VALUE_WORDS];
        } else {
            u32 word = group.value[(k / 8 * 4 + k % 4) % VALUE_WORDS];
            u16 half = k / 4 % 2 ? word >> 16 : word;
            if (half) ((u16 *)row)[column] = half;
        }
    }
}

// The dense weight: a warp unpacks the segment of a row at a time in shared memory and writes it out.
extern "C" __global__ void __launch_bounds__(THREADS) unpack(
    const void *value0, const void *value1, const void *value2, const void *value3, const u32 *index0, const u32 *index1,
    const u32 *index2, const u32 *index3, const u16 *bases, const i64 *starts, const float *scale, void *out, int rows,
    int columns, int width, int segments
) {
    const int bytes = X == FP32 ? 4 : 2;
    Planes planes = {value0, value1, value2, value3, index0, index1, index2, index3, bases};
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    char *mine = memory + warp * width * bytes;
    for (i64 unit = (i64)blockIdx.x * WARPS + warp; unit < (i64)rows * segments; unit += gridDim.x * WARPS) {
        i64 row = unit / segments, start = starts[unit];
        int first = unit % segments * width, wide = min(width, columns - first), count = start >> 40;
        for (int c = lane; c < width * bytes / 16; c += 32) ((uint4 *)mine)[c] = {0, 0, 0, 0};
        __syncwarp();
        for (int g = lane; g < count; g += 32) {
            Group group = read_group(planes, (start & BEGIN) + g);
            group.base = UNIT * (CELL ? g * STEP : group.base - first);
            put_entries(group, mine, SCALED ? scale[row] : 1.0f);
        }
        __syncwarp();
        char *to = (char *)out + (row * columns + first) * bytes;
        if (columns * bytes % 16 == 0) {
            for (int c = lane; c < wide * bytes / 16; c += 32) ((uint4 *)to)[c] = ((uint4 *)mine)[c];
        } else {
            for (int c = lane; c < wide; c += 32) {
                if (X == FP32) ((u32 *)to)[c] = ((u32 *)mine)[c];
                else ((u16 *)to)[c] = ((u16 *)mine)[c];
            }
        }
        __syncwarp();
    }
}
