//! A seeded cluster of the real negotiation state machines, for development.
