// CUDA on the CPU, as far as images/cuda-probe/kernels/gdn.cu needs it: the threads of a block are fibers that take
// turns at __syncthreads and shuffles, blocks run one after another. The kernel's source stays as it is but for its
// launches, which the test rewrites to emulate::launch(...).
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __shared__ static  // one block at a time, on one thread of the host

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void *;
enum cudaError_t { cudaSuccess = 0 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char *cudaGetErrorString(cudaError_t) { return "no error"; }

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace {
dim3 blockIdx, threadIdx, blockDim;
}

namespace emulate {

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    bool done = false;
};

inline ucontext_t scheduler;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<float> exchange;
inline unsigned current;
inline std::function<void()> body;

inline void enter() {
    body();
    fibers[current]->done = true;
    swapcontext(&fibers[current]->context, &scheduler);
}

// Give the other threads of the block their turn: everyone reaches this point before anyone goes on.
inline void yield() { swapcontext(&fibers[current]->context, &scheduler); }

inline void run_block(unsigned threads) {
    exchange.assign(threads, 0.0f);
    while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
    for (unsigned i = 0; i < threads; ++i) {
        Fiber &fiber = *fibers[i];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool running = true; running;) {
        running = false;
        for (unsigned i = 0; i < threads; ++i) {
            if (fibers[i]->done) continue;
            running = true;
            current = i;
            threadIdx = dim3(i, 0, 0);
            swapcontext(&scheduler, &fibers[i]->context);
        }
    }
}

inline void launch(dim3 grid, dim3 block, size_t, cudaStream_t, std::function<void()> kernel) {
    body = std::move(kernel);
    blockDim = block;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = dim3(x, y, z);
                run_block(block.x);
            }
}

inline float shuffle(float value, unsigned source) {
    const unsigned self = current;
    exchange[self] = value;
    yield();
    const float got = exchange[source];
    yield();
    return got;
}

}  // namespace emulate

#define __syncthreads() emulate::yield()

inline float __shfl_xor_sync(unsigned, float value, int mask) {
    return emulate::shuffle(value, emulate::current ^ static_cast<unsigned>(mask));
}

inline float __shfl_down_sync(unsigned, float value, int offset) {
    const unsigned lane = emulate::current % 32;
    return emulate::shuffle(value, lane + offset < 32 ? emulate::current + offset : emulate::current);
}
