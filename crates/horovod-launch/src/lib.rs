//! horovodrun: hosts, spawning, rendezvous, output.
