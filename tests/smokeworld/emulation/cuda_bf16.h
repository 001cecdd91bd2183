// bfloat16 in software: the upper half of a float, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits;
};

inline __nv_bfloat16 __float2bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if ((word & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {static_cast<uint16_t>((word + 0x7fffu + (word >> 16 & 1u)) >> 16)};
}

inline float __bfloat162float(__nv_bfloat16 value) {
    const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &word, 4);
    return result;
}
