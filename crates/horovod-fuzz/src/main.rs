//! Writes the valid inputs of [`horovod_fuzz::SEEDS`] into the corpus.

fn main() -> std::io::Result<()> {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (path, bytes) in horovod_fuzz::seeds() {
        std::fs::write(corpus.join(path), bytes)?;
    }
    Ok(())
}
