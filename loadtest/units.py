"""Times are nanoseconds of the monotonic clock wherever they are kept; these take them to what people read."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
