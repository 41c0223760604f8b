"""Remove near-duplicates: MinHash signatures, bands, groups, filter; on disk, one task per shard or band."""
