// Runs a CUDA kernel on a CPU, one thread at a time: what decode.cu uses of CUDA, in C++. Threads are ucontexts that
// switch at __syncthreads and at shuffles; those of a block run in turn, so a missing barrier gives wrong results.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#define ON_CPU
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 { int x = 0, y = 0; };
struct int2 { int x, y; };
struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static dim3 threadIdx, blockIdx, gridDim;
alignas(16) char memory[256 << 10];
using std::min;

struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
    long barriers[2] = {0, 0}; // that it has come to: of its block, of its warp
    bool ended = false;
    float given = 0; // to the other threads of its warp
};

static std::vector<Thread> threads;
static ucontext_t scheduler;
static int current;

// Others run until all of them, from the first up to the last, have come here or ended.
static void wait(int which, int first, int last) {
    int mine = current;
    long number = ++threads[mine].barriers[which];
    auto late = [&](const Thread &one) { return !one.ended && one.barriers[which] < number; };
    while (std::any_of(threads.begin() + first, threads.begin() + last, late))
        swapcontext(&threads[mine].context, &scheduler);
}

static void __syncthreads() { wait(0, 0, threads.size()); }
static void __syncwarp() { wait(1, current / 32 * 32, current / 32 * 32 + 32); }

static float __shfl_xor_sync(unsigned, float value, int far) {
    int mine = current, warp = mine / 32 * 32;
    threads[mine].given = value;
    wait(1, warp, warp + 32);
    value = threads[mine ^ far].given;
    wait(1, warp, warp + 32);
    return value;
}

static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 255) * (b >> byte & 255);
    return sum;
}

static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int byte = 0; byte < 4; byte++) result |= (unsigned)(both >> 8 * (selector >> 4 * byte & 7) & 255) << 8 * byte;
    return result;
}

static uint4 read4(const void *plane, long long group) { return ((const uint4 *)plane)[group]; }
static unsigned read1(const void *plane, long long group) { return ((const unsigned *)plane)[group]; }

static void wait_for_launch_before() {}
static void allow_launch_after() {}

static float fp16_as_float(unsigned word) {
    int exponent = word >> 10 & 31, fraction = word & 1023;
    float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                 : exponent == 0 ? std::ldexp((float)fraction, -24)
                                 : std::ldexp((float)(fraction | 1024), exponent - 25);
    return word & 0x8000 ? -size : size;
}

static unsigned short rounded_to_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    return std::isnan(value) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static unsigned short rounded_to_fp16(float value) { // for numbers that are not subnormal in fp16
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return sign | 0x7E00;
    bits += 0xFFF + (bits >> 13 & 1);
    if (bits >= 0x47800000) return sign | 0x7C00;
    return bits < 0x38800000 ? sign : sign | (bits - 0x38000000) >> 13;
}

template <typename... Types, std::size_t... Places>
static void call(void (*kernel)(Types...), void **arguments, std::index_sequence<Places...>) {
    kernel(*(Types *)arguments[Places]...);
}

// Runs every thread of every block; arguments are pointers to them, as the CUDA driver takes them.
template <typename... Types> static void launch(void (*kernel)(Types...), int across, int down, int size, void **given) {
    static void (*job)(Types...);
    static void **arguments;
    job = kernel, arguments = given, gridDim = {across, down};
    for (int block = 0; block < across * down; block++) {
        blockIdx = {block % across, block / across};
        std::memset(memory, 0xFF, sizeof memory); // NaN, in case something is read that was not written
        threads = std::vector<Thread>(size);
        for (Thread &one : threads) {
            getcontext(&one.context);
            one.context.uc_stack.ss_sp = one.stack.data();
            one.context.uc_stack.ss_size = one.stack.size();
            one.context.uc_link = &scheduler;
            void (*body)() = [] {
                call(job, arguments, std::index_sequence_for<Types...>{});
                threads[current].ended = true;
            };
            makecontext(&one.context, body, 0);
        }
        auto running = [](const Thread &one) { return !one.ended; };
        while (std::any_of(threads.begin(), threads.end(), running))
            for (current = 0; current < size; current++)
                if (!threads[current].ended) {
                    threadIdx = {current, 0};
                    swapcontext(&scheduler, &threads[current].context);
                }
    }
}
