from meshwright.cli import main

raise SystemExit(main())
