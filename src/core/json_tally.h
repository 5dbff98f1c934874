// Counts what a JSON text will be made of before it is read, so that its cost in memory is known first. It checks
// nothing: of a text that is no JSON it counts what looks like it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace spile {

struct JsonTally {
  uint64_t lists = 0, objects = 0, keys = 0, strings = 0, scalars = 0;  // strings that are no keys; scalars: all else
  uint64_t text_nbytes = 0;  // of keys and strings as Python keeps them: each as wide as its widest character
};

inline JsonTally tally_json(const uint8_t* p, size_t n) {
  JsonTally t;
  size_t i = 0;
  while (i < n) {
    switch (p[i]) {
      case '[': ++t.lists; ++i; break;
      case '{': ++t.objects; ++i; break;
      case ':': ++t.keys; ++i; break;  // each follows a string that was no value
      case '"': {
        const size_t start = ++i;
        uint64_t width = 1;
        for (; i < n && p[i] != '"'; ++i) {
          const uint8_t c = p[i];
          if (c >= 0x80) {
            width = std::max<uint64_t>(width, c >= 0xF0 ? 4 : 2);
          } else if (c == '\\') {
            ++i;
            // halves of a pair (D8 to DF) stand for a character beyond 16 bits
            if (i < n && p[i] == 'u') {
              const bool half = i + 2 < n && (p[i + 1] | 0x20) == 'd' && p[i + 2] >= '8';
              width = std::max<uint64_t>(width, half ? 4 : 2);
            }
          }
        }
        ++t.strings;
        t.text_nbytes += width * (std::min(i, n) - start);
        ++i;
        break;
      }
      case ' ': case '\t': case '\r': case '\n': case ',': case ']': case '}': ++i; break;
      default:
        ++t.scalars;
        while (i < n && p[i] > ' ' && p[i] != ',' && p[i] != ']' && p[i] != '}' && p[i] != ':' && p[i] != '"' && p[i] != '[' &&
               p[i] != '{') {
          ++i;
        }
        if (i < n && p[i] < ' ' && p[i] != '\t' && p[i] != '\r' && p[i] != '\n') ++i;  // no JSON: go on behind it
    }
  }
  t.strings -= std::min(t.strings, t.keys);
  return t;
}

}  // namespace spile
