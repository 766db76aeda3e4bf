"""The scheduler's own policy in virtual time. Knows engines that take a known time; knows no server and no clock."""
