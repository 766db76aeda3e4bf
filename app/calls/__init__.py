"""The life of one call on any wire: key, memory, deadline, cancellation, and the record that it leaves."""
