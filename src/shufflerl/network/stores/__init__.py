"""What survives a crash: SQLite files of one machine, or a NATS JetStream cluster."""
