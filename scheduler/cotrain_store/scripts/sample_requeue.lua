-- sample_requeue: requeue the sample requests of a worker, running now or at its crash. Fenced by the worker's epoch.
-- needs: fence, sample_put_back
local resolved = {}
local count = put_back(args.prefix, args.worker, args.crashes, args.lives, args.cancel, resolved)
redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
return count
