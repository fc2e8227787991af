import argparse, runpy, sys, os
def main():
    argv = sys.argv[1:]
    cpu=False
    while argv and argv[0].startswith('--'):
        if argv[0]=='--cpu': cpu=True
        argv=argv[1:]
    if cpu:
        from megatron_dynatrain import cpu as c
        c.install()
    sys.argv=argv
    sys.path[0]=os.path.dirname(argv[0])
    runpy.run_path(argv[0], run_name='__main__')
if __name__=='__main__': main()
