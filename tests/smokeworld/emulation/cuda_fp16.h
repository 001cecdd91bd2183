// IEEE 754 binary16 in software: round to nearest even, with subnormals, infinities and NaN.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
    uint16_t bits;
};

inline __half __float2half(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    const uint16_t sign = static_cast<uint16_t>(word >> 16 & 0x8000u);
    const uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x33000001u) return {sign};
    const int exponent = static_cast<int>(magnitude >> 23) - 127;
    uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const int shift = exponent < -14 ? 13 + (-14 - exponent) : 13;
    const uint32_t rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    mantissa >>= shift;
    if (rest > half || (rest == half && (mantissa & 1u))) ++mantissa;
    if (exponent < -14) return {static_cast<uint16_t>(sign | mantissa)};
    return {static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + mantissa))};
}

inline float __half2float(__half value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t exponent = value.bits >> 10 & 0x1fu, mantissa = value.bits & 0x3ffu;
    uint32_t word;
    if (exponent == 0) {
        float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&word, &magnitude, 4);
        word |= sign;
    } else if (exponent == 31) {
        word = sign | 0x7f800000u | mantissa << 13;
    } else {
        word = sign | (exponent + 112) << 23 | mantissa << 13;
    }
    float result;
    std::memcpy(&result, &word, 4);
    return result;
}
