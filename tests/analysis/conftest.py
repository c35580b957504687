"""The count of the mutants, at the end of every run that has some."""


def pytest_terminal_summary(terminalreporter):
    names = {
        outcome: {report.nodeid for report in terminalreporter.stats.get(outcome, []) if "::test_mutant_is_caught[" in report.nodeid}
        for outcome in ("passed", "failed", "error")
    }
    if every := set.union(*names.values()):
        terminalreporter.write_line(f"mutants caught {len(names['passed'] - names['failed'] - names['error'])}/{len(every)}")
