"""Sans-IO state machines: messages, source, sink, peers."""
