"""The store of several hubs: journal in PostgreSQL, sealed files in a bucket, slots with one owner each."""
