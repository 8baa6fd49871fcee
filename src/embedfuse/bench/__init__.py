"""The benchmark suite behind `embedfuse bench`: named cases, providers that take turns, and a report made from JSON.

`cases` says what is measured, `batches` draws it, `providers` are the contestants, `checking` compares each with a
float64 computation before `timing` may measure it, and `runner` writes all of it down. `report` and `roofline` read
only what was written. Whole models are in `models`.
"""
