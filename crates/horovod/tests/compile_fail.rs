//! Programs that must not compile, with the words of the compiler. A file of its own: it runs cargo.

#[test]
fn programs_that_break_the_rules_do_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
