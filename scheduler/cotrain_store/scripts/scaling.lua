-- scaling: store the scheduler's decision on a pool's number of workers. Fenced by the scheduler's epoch.
-- The record follows `args`.
-- needs: fence
redis.call('SET', args.prefix .. 'scaling', ARGV[2])
return 'OK'
