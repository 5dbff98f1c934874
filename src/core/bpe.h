// Words of bytes into the ids of a byte-level BPE vocabulary, from a table that lies in memory or in a mapped file.
//
// The table (little-endian; written by src/spile/bpe_table.py, its numbers checked here once, when it is opened):
//   char magic[8]; u32 version, num_entries, num_merge_slots, num_word_slots; u64 blob_nbytes, meta_nbytes;
//   u8 source_digest[32], digest[32];                  of tokenizer.json, of all other bytes of this file
//   u32 byte_ids[256];                                 byte -> id, kNone where the vocabulary lacks it
//   u32 merges[num_merge_slots][4];                    open addressing: left, right, rank, merged; left kNone: empty
//   u32 words[num_word_slots];                         open addressing: ids of entries; none unless a whole entry wins over merges
//   u32 offsets[num_entries + 1]; u8 blob[blob_nbytes] the bytes of each entry
//   u8 meta[meta_nbytes]                               JSON, read by src/spile/bpe.py
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace spile {

struct MergeSlot {
  uint32_t left, right, rank, merged;
};

class Bpe {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr size_t kHeaderNbytes = 104;

  Bpe(const uint8_t* data, size_t nbytes);  // throws std::invalid_argument that says what is damaged

  // Appends the ids of one word. Merges the pair of lowest rank first, the leftmost of equals.
  void encode(const uint8_t* word, size_t n, std::vector<uint32_t>* ids) const;

  uint32_t num_entries() const { return num_entries_; }

 private:
  const MergeSlot* find(uint32_t left, uint32_t right) const;  // null: the two do not merge
  uint32_t find_word(const uint8_t* word, size_t n) const;     // kNone: no entry
  void merge_short(uint32_t* symbols, size_t n, std::vector<uint32_t>* ids) const;  // time n * n, no memory
  void merge_long(const std::vector<uint32_t>& symbols, std::vector<uint32_t>* ids) const;  // time n * log n

  uint32_t num_entries_ = 0, num_merge_slots_ = 0, num_word_slots_ = 0;
  const uint32_t* byte_ids_ = nullptr;
  const MergeSlot* merges_ = nullptr;
  const uint32_t* words_ = nullptr;
  const uint32_t* offsets_ = nullptr;
  const uint8_t* blob_ = nullptr;
};

// Fills the two hashed parts of a table. `merges` is [n][3]: left, right, merged, in the order of rank; of equal pairs the
// last counts. `ids` are those of the entries that a whole word can be.
std::vector<MergeSlot> hash_merges(const uint32_t* merges, size_t n);
std::vector<uint32_t> hash_words(const uint32_t* ids, size_t n, const uint32_t* offsets, const uint8_t* blob);

}  // namespace spile
