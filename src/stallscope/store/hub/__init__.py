"""The hub's store: what arrives is committed, kept hot in memory, and sealed into Parquet files."""
