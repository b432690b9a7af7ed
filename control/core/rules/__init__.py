"""One file a command family. Every rule is `(scene, session, event) -> Decision`; the table picks it."""
