"""The hub's store: received rows are committed, kept hot in memory, and sealed into Parquet files."""
