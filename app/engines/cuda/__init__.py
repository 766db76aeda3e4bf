"""A GPU as engines need it: the driver, memory that is allocated once, and batches in flight."""
