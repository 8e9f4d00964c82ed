"""The doctor: which path reads really take on a machine, how fast, and what would help.

`examine` measures, `diagnose` judges, without any effect. `rdt-doctor` is both as a command.
"""

from rdt_transport.doctor.advice import Finding
from rdt_transport.doctor.examination import Examination
from rdt_transport.doctor.examine import examine
from rdt_transport.doctor.report import as_json, as_text
from rdt_transport.doctor.verdict import diagnose, exit_status

__all__ = ["Examination", "Finding", "as_json", "as_text", "diagnose", "examine", "exit_status"]
